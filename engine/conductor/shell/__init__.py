"""The conductor around its decisions: finds engines and nodes, hears what they say, sends requests, streams answers."""
