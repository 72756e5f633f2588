"""Plans written by hand, for the tests of what plans can do without any model."""

from collections.abc import Sequence
from dataclasses import replace

from autotp.algebra.split import block
from autotp.cost.collectives import (
    count_dtype_bytes,
    count_wire_bytes,
    estimate_memory_bytes,
    estimate_time_ps,
)
from autotp.cost.machine import load_machine
from autotp.oprules.rulebook import find_rules_root
from autotp.records.plan import (
    CollectiveRecord,
    Pair,
    ParameterRecord,
    PlacementRecord,
    Plan,
    Shard,
)

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY = 4096, 14336, 32, 8, 128, 128256
BATCH, SEQUENCE = 1, 4096
DTYPE = "bfloat16"


def parameter(
    name: str,
    shape: Sequence[int],
    tp: int,
    layout: str,
    dim: int | None = None,
    axis: str | None = None,
    size: int | None = None,
    reason: str = "",
) -> ParameterRecord:
    """A record cut in equal blocks of `dim`, or whole without one."""
    whole = tuple(shape)
    total = count_dtype_bytes(DTYPE)
    for length in whole:
        total *= length
    if dim is None:
        shards = (Shard(whole, total, ()),) * tp
        return ParameterRecord(
            name,
            layout,
            None,
            None,
            None,
            whole,
            DTYPE,
            total,
            (),
            shards,
            (PlacementRecord("R"),),
            reason,
        )
    cut = block(whole[dim])
    local = (*whole[:dim], cut.local_length(0, tp), *whole[dim + 1 :])
    shards = tuple(Shard(local, total // tp, tuple(cut.ranges(r, tp))) for r in range(tp))
    placement = (PlacementRecord("S", dim, axis or ""),)
    return ParameterRecord(
        name, layout, dim, axis, size, whole, DTYPE, total, cut.encode(), shards, placement
    )


def layer_parameters(layer: int, tp: int) -> list[ParameterRecord]:
    """The parameters of one block: grouped-query attention, gated MLP, two norms."""
    at = f"model.layers.{layer}"
    heads, ffn = f"{at}.self_attn.kv", f"{at}.mlp.ffn"
    kv = KV_HEADS * HEAD_SIZE
    norm = "a norm needs the whole hidden state"
    return [
        parameter(f"{at}.self_attn.q_proj.weight", (HIDDEN, HIDDEN), tp, "column", 0, heads, 8),
        parameter(f"{at}.self_attn.k_proj.weight", (kv, HIDDEN), tp, "column", 0, heads, 8),
        parameter(f"{at}.self_attn.v_proj.weight", (kv, HIDDEN), tp, "column", 0, heads, 8),
        parameter(f"{at}.self_attn.o_proj.weight", (HIDDEN, HIDDEN), tp, "row", 1, heads, 8),
        parameter(f"{at}.mlp.gate_proj.weight", (FFN, HIDDEN), tp, "column", 0, ffn, FFN),
        parameter(f"{at}.mlp.up_proj.weight", (FFN, HIDDEN), tp, "column", 0, ffn, FFN),
        parameter(f"{at}.mlp.down_proj.weight", (HIDDEN, FFN), tp, "row", 1, ffn, FFN),
        parameter(f"{at}.input_layernorm.weight", (HIDDEN,), tp, "norm", reason=norm),
        parameter(f"{at}.post_attention_layernorm.weight", (HIDDEN,), tp, "norm", reason=norm),
    ]


def layer_pairs(layer: int, tp: int) -> list[Pair]:
    """Attention and MLP of one block."""
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    return [
        Pair(
            "attention",
            f"{attention}.kv",
            KV_HEADS,
            (KV_HEADS // tp,) * tp,
            tuple(f"{attention}.{name}_proj.weight" for name in "qkv"),
            (f"{attention}.o_proj.weight",),
            "kv*g*d",
            attention,
            True,
        ),
        Pair(
            "mlp",
            f"{mlp}.ffn",
            FFN,
            (FFN // tp,) * tp,
            (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
            (f"{mlp}.down_proj.weight",),
            "ffn",
            mlp,
            True,
        ),
    ]


def collective(
    kind: str, phase: str, where: str, payload: int, tp: int, axis: str = ""
) -> CollectiveRecord:
    """A record priced on the h100 machine."""
    machine = load_machine("h100", find_rules_root())
    sent, time = count_wire_bytes(kind, payload, tp), estimate_time_ps(kind, payload, tp, machine)
    return CollectiveRecord(kind, phase, where, payload, sent, time, "tp", axis)


def layer_collectives(layer: int, tp: int, training: bool) -> list[CollectiveRecord]:
    """Two all-reduces forward, two backward."""
    at = f"model.layers.{layer}"
    payload = BATCH * SEQUENCE * HIDDEN * count_dtype_bytes(DTYPE)
    forward = [
        collective("all_reduce", "forward", f"{at}.self_attn.o_proj", payload, tp),
        collective("all_reduce", "forward", f"{at}.mlp.down_proj", payload, tp),
    ]
    before = {"input_layernorm": f"{at}.self_attn.kv", "post_attention_layernorm": f"{at}.mlp.ffn"}
    backward = [
        collective("all_reduce", "backward", f"{at}.{norm}", payload, tp, axis)
        for norm, axis in before.items()
    ]
    return [*forward, *(backward if training else [])]


def decoder_plan(layers: int = 32, tp: int = 8, training: bool = True) -> Plan:
    """The Megatron plan of a decoder with grouped-query attention and an untied head."""
    vocabulary = "vocabulary"
    embedding = parameter(
        "model.embed_tokens.weight", (VOCABULARY, HIDDEN), tp, "column", 1, "hidden", HIDDEN
    )
    head = parameter(
        "lm_head.weight", (VOCABULARY, HIDDEN), tp, vocabulary, 0, vocabulary, VOCABULARY
    )
    last = parameter("model.norm.weight", (HIDDEN,), tp, "norm", reason="a norm needs it whole")
    blocks = [record for k in range(layers) for record in layer_parameters(k, tp)]
    records = [embedding, *blocks, last, head]
    head_pair = Pair(
        vocabulary,
        vocabulary,
        VOCABULARY,
        (VOCABULARY // tp,) * tp,
        ("lm_head.weight",),
        (),
        vocabulary,
        "lm_head",
        True,
    )
    payload = BATCH * SEQUENCE * HIDDEN * count_dtype_bytes(DTYPE)
    collectives = [
        collective("all_gather", "forward", "model.embed_tokens", payload, tp),
        *(c for k in range(layers) for c in layer_collectives(k, tp, training)),
    ]
    plan = Plan(
        model="DecoderForCausalLM",
        fingerprint="0123456789abcdef",
        tp=tp,
        training=training,
        variant="attention_mask, input_ids · eval",
        objective="communication",
        machine="h100",
        sizes={"batch": BATCH, "sequence": SEQUENCE},
        pairs=(*(pair for k in range(layers) for pair in layer_pairs(k, tp)), head_pair),
        parameters={record.name: record for record in records},
        collectives=tuple(collectives),
        cost={"forbidden": 0, "home_bytes": 0, "time_ps": sum(c.time_ps for c in collectives)},
        bound={"forbidden": 0, "home_bytes": 0, "time_ps": sum(c.time_ps for c in collectives)},
        gap=0.0,
        method="elimination",
        width=2,
        variables=1996,
        memory={},
        replicated_fraction=0.00003,
        unruled=(),
        warnings=(),
        dynamic=True,
        options={"optimizer": "adamw", "state_dtype": None, "overrides": {}, "extra": (1, 2)},
        choices={"linear_7": "column o", "add_3": "R"},
    )
    return replace(plan, memory=_memory(plan))


def _memory(plan: Plan) -> dict[str, int]:
    held = sum(record.shards[0].bytes for record in plan.parameters.values())
    memory = estimate_memory_bytes({DTYPE: held}, training=plan.training)
    return {**memory, "buffers": 512, "total": sum(memory.values()) + 512}
