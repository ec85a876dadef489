"""The settings that exclude each other: one table, which recipes, runs and plans read by ``conflict``.

What a setting needs of the model or of the number of processes is not here; it is checked where these are known.
"""

from collections.abc import Set

SHARDED, EXPERTS = "parallel.tp_size above 1", "parallel.ep_size above 1 or parallel.quantised"
COMPILED, ON_HOST, MOVED = "train.compile", "optim.offload host", "parallel.placement.every"
FROZEN, OWN_PARTS, ADAPTERS = "optim.train, train.adapter or train.draft_head", "optim.train", "train.adapter"
DRAFTS, ROUNDED, REWIRED = "train.draft_head", "parallel.quantised", "init.wiring"
OTHER_TEACHER, STREAMS = "teacher", "objective.hidden.weight"
RANDOM, REPLICATED = "init.weights random", "parallel.teacher_placement replicated"
ALONE_ROUNDED, BENCHMARK = "parallel.quantised with parallel.ep_size 1", "a benchmark as early_stop.metric"
NF4 = "train.adapter.base nf4"
UNDIVIDED, ROUNDED_MOMENTS = "parallel.zero_stage 0", "optim.moments 8bit"
OTHER_STATES = "optim.offload host or optim.moments 8bit"
FREEZES_TRAINED = "objective.freeze_embeddings or objective.freeze_lm_head"

# setting, setting, why
EXCLUSIONS = (
    (SHARDED, EXPERTS, "only dense layers are divided so; parallel.ep_size divides experts"),
    (SHARDED, UNDIVIDED, "set it to 1 or 2"),
    (SHARDED, COMPILED, "it is not proven"),
    (SHARDED, ADAPTERS, "with optim.train alone it can"),
    (SHARDED, ON_HOST, "it is not proven"),
    (SHARDED, BENCHMARK, "it is not proven"),
    (ON_HOST, UNDIVIDED, "set it to 1 or 2"),
    (ROUNDED_MOMENTS, UNDIVIDED, "set it to 1 or 2"),
    (ROUNDED_MOMENTS, ON_HOST, "the moments on the host are in fp32"),
    (MOVED, OTHER_STATES, "the states of experts move in fp32, between GPUs"),
    (COMPILED, EXPERTS, "layers that send or round rows cannot be compiled"),
    (FROZEN, RANDOM, "what is frozen must have learned something"),
    (FROZEN, REPLICATED, "the teacher's experts are the student's"),
    (FROZEN, MOVED, "it moves experts that train"),
    (FROZEN, ALONE_ROUNDED, "it is not proven"),
    (NF4, EXPERTS, "routed experts are stored stacked, and only linear layers are rounded"),
    (NF4, COMPILED, "it is not proven"),
    (DRAFTS, OWN_PARTS, "the head alone trains"),
    (DRAFTS, ADAPTERS, "the head alone trains"),
    (DRAFTS, REWIRED, "convert and heal the model first, because the head belongs to what is served"),
    (DRAFTS, OTHER_TEACHER, "the model itself is the teacher of its head"),
    (DRAFTS, STREAMS, "the head has none of the layers that would be compared"),
    (DRAFTS, ROUNDED, "the rows of a frozen model are sent as they are"),
    (DRAFTS, BENCHMARK, "a head answers nothing alone; held_out measures it"),
    (OWN_PARTS, FREEZES_TRAINED, "it names embeddings or head, which would be frozen"),
)


def conflict(settings: Set[str]) -> str | None:
    """Why settings cannot be combined, in a line that begins with one of them; None if they can."""
    found = ((one, other, why) for one, other, why in EXCLUSIONS if one in settings and other in settings)
    return next((f"{one} cannot be combined with {other}: {why}" for one, other, why in found), None)
