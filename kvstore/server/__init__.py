"""What every daemon needs: listening, identities, the gate, the event loop, HTTP, spans. Independent of nodes."""
