"""What the processes of one machine share: the files of a node's folder in shared memory, and which process writes."""
