"""Compares the headers with config.json, and the layers with one another, without torch or transformers.

``fcsd inspect`` answers by this comparison, in a fraction of a second. Layers of one kind (dense or MoE, with linear
attention or not) must have the same tensors, so a tensor that most of them have and one lacks is missing. What all
layers lack is found only by :func:`fcsd.checkpoint.verify.compare_tensors`, which builds the base class; ``convert``
always does that.
"""

import re
from collections import Counter, defaultdict
from typing import Any

from fcsd.checkpoint.config_json import CheckpointConfig
from fcsd.checkpoint.files import shown
from fcsd.checkpoint.headers import TensorInfo
from fcsd.checkpoint.layout import Layout
from fcsd.checkpoint.names import LAYERS
from fcsd.checkpoint.verify import FLOATS, MXFP4_BLOCK, Comparison, Shape, refuse_inflated
from fcsd.models.archs import ARCHS
from fcsd.models.config_keys import EXPERTS_PER_TOKEN, expert_count, first_count

_LAYER = re.compile(rf"(?P<stack>(?:.*?\.)?{LAYERS})(?P<number>\d+)\.(?P<rest>.+)")
_KINDS = tuple(map(re.compile, (r"\.experts\.|^moe\.", r"conv(1d)?\.weight$", r"\.indexer\.", r"\.o_proj\.")))
_NORM = re.compile(r"\w*norm\w*\.(?:norm\.)?(\w+)")
_EXPERT = re.compile(r"(?P<block>\w+\.experts\.)(?P<number>\d+)(?P<rest>\..+)")
# Modules that predict further tokens, if they are not layers after the last one.
_KEYS = re.compile(r"self_attn\.[kv]_(?:proj|norm)\.")
_FURTHER_TOKENS = re.compile(r"(?:^|\.)mtp")
_NEEDED = ("num_hidden_layers", "hidden_size", "vocab_size", "tie_word_embeddings")

Tensors = dict[str, TensorInfo]


def compare_layers(layout: Layout, config: CheckpointConfig) -> Comparison | None:
    """The differences between config.json and the headers, as far as they show without the base class.

    The shapes in ``parameters`` have the right number of elements; for MXFP4 their order is that of the file.

    Returns:
        The comparison. It is None if config.json leaves out a value that is needed here, and for which transformers has
        a default.

    Raises:
        BadInputError: config.json describes far more layers or experts than the files could hold.
    """
    refuse_inflated(max(len(layout.tensors), len(layout.weight_map or ())), config, layout.path)
    text: dict[str, Any] = {**{key: config.raw[key] for key in _NEEDED if key in config.raw}, **config.text}
    row, plain = ARCHS.get(config.model_type), _without_quantisation(layout.tensors)
    if row is not None and row.text_config is not None:  # transformers does not read the decoder's own value
        text["tie_word_embeddings"] = config.raw.get("tie_word_embeddings")
    further = [name for name in plain if row and row.later_layers and _FURTHER_TOKENS.search(name)]
    further += [name for name in plain if row and row.spanning and _is_replaced(name, text)]
    plain = {name: tensor for name, tensor in plain.items() if name not in set(further)}
    outside, stacks = _by_layer(plain)
    decoder = next((stack for stack in stacks if "vision" not in stack), "model.layers.")
    moe = any(".experts." in f".{rest}" for layer in stacks[decoder].values() for rest in layer)
    if any(text.get(key) is None for key in _NEEDED) or (moe and not first_count(text, EXPERTS_PER_TOKEN)):
        return None
    experts = expert_count(text)
    if moe and not experts:
        return None

    depths = {decoder: text["num_hidden_layers"]}
    vision = config.raw.get("vision_config") or {}
    depths |= {stack: vision.get("num_hidden_layers") for stack in stacks.keys() - depths.keys()}
    found = Comparison({}, [], [], [], further, text)
    for stack, depth in depths.items():
        layers = stacks[stack]
        depth = len(layers) if depth is None else depth
        found.missing.extend(f"{stack}{number}.*" for number in range(depth) if number not in layers)
        later = [f"{stack}{n}.{rest}" for n, layer in layers.items() if n >= depth for rest in layer]
        (found.carried if row and row.later_layers else found.unexpected).extend(later)
        types = (text.get("layer_types") or [None] * depth) if stack == decoder else [None] * depth
        own = depth - (text.get("num_kv_shared_layers") or 0)  # the later ones read the keys and values of others
        kinds = {n: (_kind(layer), n < own, *types[n : n + 1]) for n, layer in layers.items() if n < depth}
        for kind in dict.fromkeys(kinds.values()):
            _compare_with_one_another(stack, {n: layers[n] for n in kinds if kinds[n] == kind}, experts, found)
    inner = _inner(decoder)
    spanning = {f"{inner}{name}" for name in (row.spanning if row else ())}
    norm = {f"{row.final_norm if row else 'norm'}.{name}" for name in _norm(stacks[decoder])}
    head = "lm_head.weight" if row and row.stored else _head(decoder)
    _compare_outside(
        {name: tensor for name, tensor in outside.items() if name not in spanning},
        *(inner, f"{inner}{row.embedding if row else 'embed_tokens'}.weight", head, norm, text, bool(vision), found),
    )

    found.carried.extend(name for name in plain if name.endswith("rotary_emb.inv_freq"))
    if config.quantization is None:
        found.wrong.extend(
            f"{shown(name)} is {tensor.dtype} {list(tensor.shape)}, not {'/'.join(FLOATS)}"
            for name, tensor in plain.items()
            if tensor.dtype not in FLOATS
        )
    left_out = {*found.carried, *found.unexpected, *([head] if text["tie_word_embeddings"] else [])}
    found.parameters.update({name: tensor.shape for name, tensor in plain.items() if name not in left_out})
    return found


def _without_quantisation(tensors: Tensors) -> Tensors:
    """The tensors without the scales of quantised ones. Packed blocks get the name and size of what they hold."""
    plain = {}
    for name, tensor in tensors.items():
        if name.endswith("_blocks") and tensor.dtype == "U8" and len(tensor.shape) > 2:
            shape = (*tensor.shape[:-2], tensor.shape[-2] * MXFP4_BLOCK)
            plain[name.removesuffix("_blocks")] = TensorInfo(tensor.dtype, shape, tensor.start, tensor.end)
        elif not name.endswith(("_scales", "_scale_inv")):
            plain[name] = tensor
    return plain


def _by_layer(tensors: Tensors) -> tuple[Tensors, dict[str, dict[int, Tensors]]]:
    """The tensors outside of layers, and by stack (``model.layers.``) and number of the layer those inside."""
    outside: Tensors = {}
    stacks: dict[str, dict[int, Tensors]] = defaultdict(lambda: defaultdict(dict))
    for name, tensor in tensors.items():
        if match := _LAYER.fullmatch(name):
            if not match["rest"].endswith("rotary_emb.inv_freq"):
                stacks[match["stack"]][int(match["number"])][match["rest"]] = tensor
        else:
            outside[name] = tensor
    return outside, stacks


def _kind(layer: Tensors) -> tuple[bool, ...]:
    """Whether a layer has experts, linear attention, which begins with a convolution, an indexer of keys, attention."""
    return tuple(any(kind.search(rest) for rest in layer) for kind in _KINDS)


def _is_replaced(name: str, text: dict[str, Any]) -> bool:
    """Whether a tensor makes keys or values of a layer that reads those of another; such files hold it nevertheless."""
    match, own = _LAYER.fullmatch(name), text["num_hidden_layers"] - (text.get("num_kv_shared_layers") or 0)
    return bool(match and int(match["number"]) >= own and _KEYS.match(match["rest"]) and "vision" not in match["stack"])


def _compare_with_one_another(stack: str, layers: dict[int, Tensors], experts: int, found: Comparison) -> None:
    """Compare layers of one kind: each must have what at least half of them have, in the most frequent shape."""
    shapes: dict[str, Counter[Shape]] = defaultdict(Counter)  # the expert's number is replaced by * in the key
    holders: Counter[str] = Counter()
    for layer in layers.values():
        patterns = {rest: _EXPERT.sub(r"\g<block>*\g<rest>", rest) for rest in layer}
        holders.update(set(patterns.values()))
        for rest, pattern in patterns.items():
            shapes[pattern][layer[rest].shape] += 1
    expected: dict[str, Shape] = {}
    for pattern, count in holders.items():
        if 2 * count >= len(layers):
            shape = shapes[pattern].most_common(1)[0][0]
            names = [pattern.replace("*", str(n)) for n in range(experts)] if "*" in pattern else [pattern]
            expected |= dict.fromkeys(names, shape)
    for number, layer in sorted(layers.items()):
        found.missing.extend(f"{stack}{number}.{rest}" for rest in expected if rest not in layer)
        found.unexpected.extend(f"{stack}{number}.{rest}" for rest in layer if rest not in expected)
        found.wrong.extend(
            _wrong(f"{stack}{number}.{rest}", tensor, expected[rest])
            for rest, tensor in layer.items()
            if rest in expected and tensor.shape != expected[rest]
        )


def _norm(layers: dict[int, Tensors]) -> set[str]:
    """The tensors of a norm of the stream, ``weight`` in most families: those of a norm that is a child of a layer.

    Those of a gate that such a norm has are left out. The norm itself is called ``norm`` then.
    """
    return {match[1] for layer in layers.values() for name in layer if (match := _NORM.fullmatch(name))}


def _compare_outside(
    outside: Tensors,
    inner: str,
    embedding: str,
    head: str,
    norm: set[str],
    text: dict[str, Any],
    vision: bool,
    found: Comparison,
) -> None:
    """Compare the embedding, the final norm and the output head with the sizes in config.json.

    Args:
        inner: what the names inside the decoder start with.
        norm: the tensors that the final norm must have.
    """
    table = (text["vocab_size"], text["hidden_size"])
    expected: dict[str, Shape] = {embedding: table, head: table}
    if text.get("use_bias") and (bias := head.replace("weight", "bias")) in outside:  # Ernie's MoE
        expected[bias] = table[:1]
    expected |= {f"{inner}{name}": table[1:] for name in norm}
    optional = {head} if text["tie_word_embeddings"] else set()
    found.missing.extend(name for name in expected if name not in outside and name not in optional)
    found.wrong.extend(
        _wrong(name, outside[name], shape)
        for name, shape in expected.items()
        if name in outside and outside[name].shape != shape
    )
    if not vision:  # the tensors of an image encoder have many names
        found.unexpected.extend(n for n in outside if n not in expected and not n.endswith("rotary_emb.inv_freq"))


def _head(decoder: str) -> str:
    """The name of the output head beside a decoder whose layers are called ``decoder``."""
    prefix = _inner(decoder)
    return ("" if prefix.startswith("model.") else prefix.removesuffix("model.")) + "lm_head.weight"


def _inner(decoder: str) -> str:
    """What the names inside a decoder start with."""
    return re.sub(f"{LAYERS}$", "", decoder)


def _wrong(name: str, found: TensorInfo, shape: Shape) -> str:
    return f"{shown(name)} is {found.dtype} {list(found.shape)}, not {list(shape)}"
