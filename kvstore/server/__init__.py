"""What every daemon needs and none owns: listening, identities, gate, event loop, HTTP, spans. It knows no node."""
