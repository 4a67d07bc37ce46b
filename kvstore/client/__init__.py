"""The client interfaces and their promises. ``local`` and ``remote`` implement them."""
