"""Shell: follows engines and nodes, carries out the decisions of a conductor, and streams answers."""
