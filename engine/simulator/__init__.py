"""Request traces: reading, generating and measuring them, and running eviction policies over them."""
