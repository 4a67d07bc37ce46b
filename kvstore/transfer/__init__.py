"""How bytes move between processes and machines. ``control`` is the codec of the local control socket."""
