"""Programs on this machine: the control socket, and what each message asks of the node."""
