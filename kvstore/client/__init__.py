"""What users call: interfaces with their promises. ``local`` and ``remote`` implement them."""
