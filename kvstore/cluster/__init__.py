"""How bytes move between nodes: the wire, its two ends, and what moves pages over it. Knows no service, no client."""
