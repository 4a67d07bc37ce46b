"""What users call: interfaces with their promises. ``local``, ``remote`` and ``memory`` implement them."""
