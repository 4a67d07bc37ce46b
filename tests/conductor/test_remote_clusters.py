"""Another pool's engines compute prompts: it offers that in our catalog, and its KV is pulled."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.helpers.conductors import client_of, serve_conductor
from tests.helpers.engines.processes import prompt, spawn_engine
from tests.helpers.processes import Machine, wait_until

EGRESS = 1 << 30


def test_a_prompt_is_computed_in_another_pool(machine: Machine, tmp_path: Path) -> None:
    home, far = ({"catalog": f"file:{tmp_path / name}", "pool": name, "catalog_ttl_s": "2"} for name in ("home", "far"))
    for pool, name in ((home, "n0"), (far, "n1")):
        machine.serve(name, dram="32MiB", listen="127.0.0.1:0", **pool)
    engines = [spawn_engine(machine, node="n0", role="both", **home), spawn_engine(machine, node="n1", **far)]
    here, there = (engine.wait_ready() for engine in engines)
    alone = here.client().generate(prompt(100), max_tokens=8, ignore_eos=True, use_pool=False)
    offer = {"offer_catalog": home["catalog"], "offer_pool": "home", "offer_egress": str(EGRESS)}
    conductors = [serve_conductor(machine, name=name, **far, **offer) for name in ("one", "two")]
    ours = serve_conductor(machine, split="always", **home)  # whatever is sooner
    with client_of(ours) as client:
        engines_known = client.knows(2, 1)["engines"]
        (name,) = (each for each in engines_known if each.startswith("far/"))
        (own,) = engines_known.keys() - {name}
        about = engines_known[name]
        assert (about["role"], about["egress_bytes_per_s"]) == ("prefill", EGRESS)
        answer = client.answer(prompt(100))
        assert (answer.routes[0]["computes"], answer.routes[0]["answers"]) == (name, own)
        assert answer.tokens == list(alone.tokens)
        assert answer.finished.usage.prefill_engine == there.address

        conductors[0].kill()  # the other one offers the same
        assert client.answer(prompt(90)).finished.reason == "length"
        wait_until("the other one is asked", lambda: client.answer(np.arange(80)).routes[0]["computes"] == name)
        assert conductors[1].terminate() == 0
        client.knows(1, 1)
        again = client.answer(prompt(100))
        assert again.routes[0]["computes"] == own and again.tokens == list(alone.tokens)
    assert ours.terminate() == 0
