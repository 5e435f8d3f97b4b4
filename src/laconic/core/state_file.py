"""A state on disk: one safetensors file that knows what kind of memory it holds and which weights it belongs to."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import Tensor

from laconic.core import artifact
from laconic.core.cache import Cache
from laconic.core.errors import Damaged
from laconic.core.state import Continuum, Deep, Factors, Layer, Level, Matrix, Opened, State, once

KIND = "laconic.state"  # of the artifact
SCHEMA = 1
FORMS = {form.__name__: form for form in (Cache, Continuum, Deep, Factors, Layer, Level, Matrix, Opened, State)}
SHORT = 12  # characters of a hash that a message shows


class Stored(NamedTuple):
    """A state as its file has it, and what the file says of it: model, tokens, source, and so on."""

    state: Any
    about: Mapping[str, Any]


def save(
    state: object,
    path: str | Path,
    *,
    kind: str,
    model: str,
    tokens: int = 0,
    version: str = "",
    source: Mapping[str, object] | None = None,
) -> None:
    """One file; a tensor that stands in two places is written once.

    `kind` is the memory's ("titans", "hope"), `model` the `fingerprint` of its slow tensors, `tokens` how many were
    read, `version` of the program; `source` says where it comes from. Raises `NonFinite` (65) for a state that is not
    finite.
    """
    tensors, shape = apart(state)
    about = {"schema": SCHEMA, "holds": kind, "model": model, "tokens": tokens, "version": version}
    about |= {"source": dict(source)} if source else {}
    artifact.save_artifact(Path(path), tensors, KIND, {**about, "shape": shape})


def apart(state: object, prefix: str = "") -> tuple[dict[str, Tensor], Any]:
    """The tensors of a tree, each once and by name, and its form as JSON, of which `built` makes it again."""
    tensors = {prefix + name: tensor for name, tensor in once(state).items()}
    return tensors, described(state, {id(tensor): name for name, tensor in tensors.items()})


def load(path: str | Path, *, kind: str, model: str, force: bool = False) -> Any:
    """What `save` wrote, bit for bit. Raises `Damaged` (76) for another schema or kind, or a file that was changed.

    A state of other weights is refused too, unless `force`.
    """
    state, about = stored(path, kind)
    made = str(about.get("model"))
    if made != model and not force:
        raise Damaged(
            f"state: made by model {made[:SHORT]}…, this is {model[:SHORT]}…; load that model or pass force=True"
        )
    return state


def stored(path: str | Path, kind: str) -> Stored:
    """What `save` wrote, whichever weights it belongs to. Raises `Damaged` (76) as `load` does."""
    tensors, about = artifact.open_artifact(Path(path), KIND)
    if about.get("schema") != SCHEMA or about.get("holds") != kind:
        there = f"{about.get('holds')} of schema {about.get('schema')}"
        raise Damaged(f"state: {path} holds {there}, asked was {kind} of schema {SCHEMA}; load it with what made it")
    left = set(tensors)
    state = built(about.get("shape"), tensors, left)
    rows = {x.shape[:1] for x in tensors.values()}
    if left or len(rows) > 1:
        odd = f"{min(left)} stands nowhere in it" if left else "its tensors have different numbers of rows"
        raise Damaged(f"state: {path}: {odd}; take another copy")
    return Stored(state, about)


def described(tree: object, names: Mapping[int, str]) -> Any:
    """The form of a tree as JSON, each tensor by the name it is written under."""
    if isinstance(tree, Tensor):
        return names[id(tree)]
    if is_dataclass(tree) and not isinstance(tree, type):
        return {"is": type(tree).__name__} | {f.name: described(getattr(tree, f.name), names) for f in fields(tree)}
    if isinstance(tree, Mapping):
        return {"of": {name: described(item, names) for name, item in cast(Mapping[str, Any], tree).items()}}
    if isinstance(tree, tuple):
        return [described(item, names) for item in cast(tuple[Any, ...], tree)]
    return None


def built(form: Any, tensors: Mapping[str, Tensor], left: set[str]) -> Any:
    """The tree that `described` had in hand; `left` loses the names it uses. Raises `Damaged` (76) for another."""
    if form is None:
        return None
    if isinstance(form, str) and form in tensors:
        left.discard(form)
        return tensors[form]
    if isinstance(form, list):
        return tuple(built(item, tensors, left) for item in cast(list[Any], form))
    if isinstance(form, dict):
        parts = cast(dict[str, Any], form)
        made = FORMS.get(str(parts.get("is")))
        if made is not None and parts.keys() == {"is", *(f.name for f in fields(made))}:
            return made(**{f.name: built(parts[f.name], tensors, left) for f in fields(made)})
        if parts.keys() == {"of"} and isinstance(parts["of"], dict):
            return {name: built(item, tensors, left) for name, item in cast(dict[str, Any], parts["of"]).items()}
    raise Damaged(
        f"state: {str(cast(object, form))[:80]!r} is no part of a state and no tensor in the file; take another copy"
    )
