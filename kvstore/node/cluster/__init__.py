"""What makes nodes a pool: pages read from each other, and which node has which."""
