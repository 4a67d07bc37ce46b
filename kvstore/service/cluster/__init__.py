"""What makes nodes a pool: pages read from each other, and who has which."""
