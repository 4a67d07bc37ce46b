"""Where bytes rest: ``folder``, ``header``, ``dram``, ``records`` are a node's shared memory; ``index`` finds keys."""
