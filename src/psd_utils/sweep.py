"""A sweep: pairs and their parameters -> the plan that workflow/Snakefile reads, a job for each notebook to be run."""

import ast
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import yaml

from .errors import PsdError, nearest
from .files import sha256_of_json
from .notebook import OPTIONAL_NUMBERS, chosen_pair
from .pairs import Member, Pair, load_pair, load_registry, resolved
from .paths import project_root, registry_file
from .plan import Machine, Resources, Size, resources, shape_of

NOTEBOOKS = {"score": "01_score", "fit": "02_fit", "controls": "03_controls", "figures": "04_figures"}
SET_BY_THE_SWEEP = ("pair", "members", "out_dir", "overwrite")
_MEMBER_NAMES = ("base", "derived", "base_revision", "derived_revision", "base_adapter", "derived_adapter")
_OF_A_SCORE = ("text", "n_tokens", "device", "dtype")
# the known-answer worlds of 03_controls know nothing of the pair: one seed of each shows that the code stands
CONTROL_DEFAULTS = {"n_seeds": 1, "n_independent": 0}
_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    str: "text (in quotes where it looks like a number)",
}
_UNKNOWN_SIZE = Resources(gpu=1, mem_mb=64_000, disk_mb=50_000, runtime=600)


@dataclass(frozen=True)
class Entry:
    """A pair of a sweep, and the notebooks' parameters by which it differs from their defaults."""

    name: str
    pair: Pair
    parameters: Mapping[str, Any]


def notebook_parameters(step: str) -> dict[str, object]:
    """Return a notebook's parameters with their defaults, from its cell of defaults."""
    return _parameters_of(project_root() / "notebooks" / f"{NOTEBOOKS[step]}.ipynb")


@cache
def _parameters_of(path: Path) -> dict[str, object]:
    cells = nbformat.read(path, as_version=4).cells
    (defaults,) = (c.source for c in cells if "parameters" in c.metadata.get("tags", []))
    pairs = [(t, s.value) for s in ast.parse(defaults).body if isinstance(s, ast.Assign) for t in s.targets]
    return {target.id: ast.literal_eval(value) for target, value in pairs if isinstance(target, ast.Name)}


def read_entries(pairs: str, common: Mapping[str, Any] | None = None) -> dict[str, Entry]:
    """Return the entries of a sweep by name.

    `pairs`: "tiny" or "public" (the registry's), names, or a YAML file with `pairs:` (a list of names, or a mapping of
    names to parameters) and perhaps `parameters:` for all of them. `common` are parameters for all, over the file's.

    Raises:
        PsdError: an unknown pair or parameter, a malformed file, or two entries of the same two models.
    """
    shared: dict[str, Any] = {}
    registered = load_registry(registry_file())
    if pairs.strip().endswith((".yaml", ".yml")):
        chosen, shared = _read_file(Path(pairs.strip()).expanduser())
    else:
        chosen = dict.fromkeys(_named(pairs.replace(",", " ").split(), list(registered)))
    shared |= common or {}
    _check_names("the parameters of all pairs", shared)
    entries = {name: _entry(name, given, shared, registered.get(name)) for name, given in chosen.items()}
    folders: dict[str, str] = {}
    for name, entry in entries.items():
        other = folders.setdefault(entry.pair.name, name)
        if other != name:
            raise PsdError(f"{other} and {name} are the same two models, so their results would share a folder")
    return entries


def _named(words: Sequence[str], registered: list[str]) -> list[str]:
    tiny = [name for name in registered if name.startswith("tiny_")]
    groups = {"tiny": tiny, "public": [name for name in registered if name not in tiny]}
    if not words:
        raise PsdError("give pairs: tiny, public, names of registered pairs, or a YAML file of your own")
    for word in words:
        if word not in groups and word not in registered:
            raise PsdError(f"no pair or group named {word!r}; {nearest(word, [*groups, *registered])}")
    return [name for word in words for name in groups.get(word, [word])]


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PsdError(f"no file of pairs at {path} (from {Path.cwd()})") from error
    except (OSError, UnicodeDecodeError) as error:
        raise PsdError(f"{path} cannot be read as YAML: {error}") from error
    except yaml.YAMLError as error:
        raise PsdError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict) or not content.get("pairs") or set(content) - {"pairs", "parameters"}:
        raise PsdError(f"{path} must hold `pairs:`, a list of names or a mapping, and may hold `parameters:`")
    pairs, shared = content["pairs"], content.get("parameters") or {}
    if isinstance(pairs, list):
        if not all(isinstance(name, str) for name in pairs):
            raise PsdError(f"{path}: a list of `pairs` holds names; give parameters as a mapping, `name: {{seed: 1}}`")
        pairs = dict.fromkeys(pairs)
    if not isinstance(pairs, dict) or not isinstance(shared, dict):
        raise PsdError(f"{path}: `pairs` must be a list or a mapping, `parameters` a mapping")
    return pairs, dict(shared)


def _check_names(where: str, given: Mapping[str, Any]) -> None:
    known = notebook_parameters("fit") | notebook_parameters("controls")
    for name, value in given.items():
        if name in SET_BY_THE_SWEEP:
            raise PsdError(f"{where}: {name} is set by the sweep")
        if name not in known:
            others = sorted(known.keys() - {*SET_BY_THE_SWEEP})
            raise PsdError(f"{where}: unknown parameter {name!r}; {nearest(str(name), others)}")
        if not isinstance(value, str | int | float | bool):
            raise PsdError(f"{where}: {name} must be text, a number or true/false, found {value!r}")
        wanted = int if name in OPTIONAL_NUMBERS else type(known[name])
        if value != "" and type(value) is not wanted:
            raise PsdError(f"{where}: {name} must be {_KINDS[wanted]}, found {value!r}")


def _entry(name: str, given: Mapping[str, Any] | None, shared: Mapping[str, Any], registered: Pair | None) -> Entry:
    where = f"pair {name}"
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
        raise PsdError(f"{where}: a name has letters, digits, - _ and .")
    if given is not None and not isinstance(given, dict):
        raise PsdError(f"{where}: its parameters must be a mapping, found {given!r}")
    _check_names(where, given or {})
    parameters = {**shared, **(given or {})}
    text = parameters.get("text")
    if text and Path(text).expanduser().exists():
        parameters["text"] = str(Path(text).expanduser().resolve())  # jobs run in another folder
    if "base" not in parameters and "derived" not in parameters:
        return Entry(name, registered or load_pair(name), parameters)
    pair = chosen_pair({"pair": "", **dict.fromkeys(_MEMBER_NAMES), **parameters})
    for role, member in (("base", resolved(pair.base)), ("derived", resolved(pair.derived))):
        parameters[role] = member.model
        if member.adapter:
            parameters[f"{role}_adapter"] = member.adapter
    return Entry(name, pair, parameters)


def make_plan(
    entries: Mapping[str, Entry],
    out_dir: Path,
    machine: Machine,
    *,
    controls: bool = True,
    processes: int = 1,
    threads: int = 1,
) -> dict[str, Any]:
    """Return the plan that workflow/Snakefile reads: for each job its parameters, what it needs, and its resources.

    A model that several pairs share, on the same text, is scored by one job. Its parameters are a list: where those
    of one pair fail (the other model of that pair may be at fault), the next pair's are tried.
    """
    jobs: dict[str, dict[str, Any]] = {}
    pairs = {}
    for entry in entries.values():
        scores = [_add_score(jobs, entry, role, machine, processes) for role in ("base", "derived")]
        steps = ["fit", *(["controls"] if controls else []), "figures"]
        names = {step: f"{step}-{entry.name}" for step in steps}
        for step in steps:
            if step == "figures":
                parameters: dict[str, Any] = {"out_dir": str(out_dir)}
            else:
                defaults = CONTROL_DEFAULTS if step == "controls" else {}
                given = _for_notebook(step, entry, {**defaults, **entry.parameters})
                parameters = {**given, "out_dir": str(out_dir), "overwrite": True}
            needs = {"fit": scores, "controls": [names["fit"]]}.get(step, list(names.values())[:-1])
            jobs[names[step]] = {
                "step": step,
                "folder": entry.pair.name,
                "parameters": [parameters],
                "needs": needs,
                "resources": _resources(step, entry, entry.pair.base, machine),
            }
        pairs[entry.name] = {"folder": entry.pair.name, "jobs": [*scores, *names.values()]}
    root, notebooks = str(project_root()), {step: f"{name}.ipynb" for step, name in NOTEBOOKS.items()}
    settings = {"python": sys.executable, "threads": threads, "processes": processes}
    return {"out_dir": str(out_dir), "root": root, "notebooks": notebooks, **settings, "pairs": pairs, "jobs": jobs}


def _for_notebook(step: str, entry: Entry, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a pair's parameters that a notebook has, and how it is told the pair."""
    own = {name: value for name, value in parameters.items() if name in notebook_parameters(step)}
    return own if "base" in entry.parameters else {"pair": entry.name, **own}


def _add_score(jobs: dict[str, dict[str, Any]], entry: Entry, role: str, machine: Machine, processes: int) -> str:
    """Add a member's scoring to the jobs, or this pair's way to it where another pair has it; return its name."""
    pair, given = entry.pair, entry.parameters
    member: Member = getattr(pair, role)
    size = Size.of(pair, given)
    read = {"text": given.get("text") or pair.text, "n_tokens": size.n_tokens}
    read |= {"dtype": given.get("dtype") or pair.dtype, "device": given.get("device")}
    name = f"score-{member.leaf}-{sha256_of_json([asdict(resolved(member)), read])[:8]}"
    own = _for_notebook("score", entry, given)
    keep = ("pair", *_MEMBER_NAMES, *_OF_A_SCORE)
    parameters = {"members": role, **{key: value for key, value in own.items() if key in keep}}
    asked = _resources("score", entry, member, machine)
    job = jobs.setdefault(
        name,
        {
            "step": "score",
            "parameters": [],
            "needs": [],
            "resources": asked | {"gpu": max(asked["gpu"], processes if asked["gpu"] else 0)},
        },
    )
    # a base first: the facts of the registry are about it
    job["parameters"].insert(0 if role == "base" else len(job["parameters"]), parameters)
    return name


def _resources(step: str, entry: Entry, member: Member, machine: Machine) -> dict[str, int]:
    on_gpu = machine.is_gpu and entry.parameters.get("device") != "cpu"
    try:
        shape = shape_of(member, entry.pair.facts)
    except PsdError:
        return asdict(_UNKNOWN_SIZE) | {"gpu": int(on_gpu and step != "figures")}
    on_gpu = on_gpu and shape.parameters > 50e6  # a smaller one is as fast on the CPU
    return asdict(resources(step, shape, Size.of(entry.pair, entry.parameters), machine, on_gpu))
