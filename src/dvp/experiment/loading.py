"""Reading experiment files: YAML, the catalogue, DeepSpeed's options. A mistake is one line that names its place."""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, Field, ValidationError

from dvp.errors import DvpError
from dvp.experiment.base import LocalBase
from dvp.experiment.config import Experiment
from dvp.experiment.data import FileSource
from dvp.experiment.training import BF16_AUTOCAST
from dvp.files import parse_json, write_text
from dvp.strict import NAME, Strict, first_problem

# All else that DeepSpeed knows follows from `training`, changes gradients, or is ignored where it is misspelt.
OF_DEEPSPEED = ("zero_optimization", "torch_autocast")
RESERVED = ("evidence", "reference", "mlflow.db", "mlartifacts")  # of the folder of results
TABLES = ("sources", "engines", "methods")  # that config/catalogue fills
DEEPEST = 32  # levels of a DeepSpeed file; what has more than 255 cannot be written down with the experiment
Given = Annotated[str, Field(min_length=1)]


class _Numbers:
    """YAML 1.2 numbers, for loader and dumper: YAML 1.1 reads `1e-6` as text, `010` as 8 and `1:30` as 90."""

    yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in forms if not tag.endswith((":int", ":float"))]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Loader(_Numbers, yaml.SafeLoader):
    """No duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused below, as no mapping can have it
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key.value}' is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value = self.construct_scalar(node)
        return int(value, 0 if value.startswith(("0o", "0x")) else 10)


class _Dumper(_Numbers, yaml.SafeDumper):
    """Quotes what the loader would not read as the same text."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        style = '"' if re.search("[\x85\u2028\u2029]", text) else None  # line breaks, unless they are escaped
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


for _tag, _form in (
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    ("float", r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"({_form})\Z"), list("-+0123456789."))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Dumper.add_representer(str, _Dumper.represent_str)


def read_yaml(path: Path) -> dict:
    """A YAML mapping. Raises DvpError, naming the file and the line."""
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        raise DvpError(f"{path}: no such file{_elsewhere(path)}") from None
    except OSError as error:
        raise DvpError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        # PyYAML's own, or what it lets through of a tag (`!!bool maybe`) whose text is of another kind.
        raise DvpError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise DvpError(f"{path}: not valid YAML: nested too deeply") from None
    if not isinstance(value, dict):
        raise DvpError(f"{path}: expected a mapping of keys to values")
    return value


def _elsewhere(path: Path) -> str:
    """What to add to the error of a file that is missing, if another folder than the repository's root is current."""
    root = path.parts[0]
    return (
        "" if path.is_absolute() or Path(root).is_dir() else f"; run this in the repository's root, which has {root}/"
    )


def parse_experiment(value: dict, where: Path, elsewhere: dict[tuple[str, str], Path] | None = None) -> Experiment:
    """Validate a resolved experiment. Raises DvpError.

    `where` is the file that messages name; `elsewhere` the file of those entries (such as `engines`, `bf16`) that are
    from another one.
    """
    try:
        return Experiment.model_validate(value)
    except ValidationError as error:
        location, message = first_problem(error, value, Experiment, more=("extends",))
        where = (elsewhere or {}).get(location[:2], where)
        raise DvpError(f"{where}: {message}") from None


def load_experiment(name: str, config: Path = Path("config")) -> Experiment:
    """The experiment config/experiments/NAME.yaml, resolved against config/catalogue. Raises DvpError.

    The local files that it names must be there: Snakemake would take results made of earlier ones for results of these.
    One that says `extends: OTHER` is config/experiments/OTHER.yaml, which may extend another one in turn, with its own
    keys on top: mappings are merged key by key, unless their `kind` or `rule` differs, anything else is replaced, and
    null takes a key away.
    """
    return _load(name, config, ())[1]


def _load(name: Any, config: Path, extended_by: tuple[str, ...]) -> tuple[dict, Experiment]:
    """An experiment as its file and those that it extends have it, and resolved."""
    path, value = _read_experiment(name, config)
    if "extends" not in value:
        _check_whole(value, path)
    else:
        parent, chain = value.pop("extends"), (*extended_by, name)
        if not isinstance(parent, str):
            raise DvpError(f"{path}: extends: expected the name of another experiment, found {parent!r}")
        if parent in chain:
            circle = " → ".join([*chain[chain.index(parent) :], parent])
            raise DvpError(f"{path}: extends: {circle} is a circle; one of them must stand alone")
        try:
            _path(parent, config)
        except DvpError as error:
            raise DvpError(f"{path}: extends: {error}") from None
        value = _merged(_load(parent, config, chain)[0], value)  # mistakes of the parent are reported in its own name
    resolved, elsewhere = dict(value), {}
    for table in TABLES:
        own = value.get(table, {})
        if not isinstance(own, dict):
            raise DvpError(f"{path}: {table}: expected a mapping of names to entries")
        file = config / "catalogue" / f"{table}.yaml"
        catalogue = read_yaml(file)
        resolved[table] = catalogue | own
        elsewhere |= {(table, entry): file for entry in catalogue if entry not in own}
    experiment = parse_experiment(resolved, path, elsewhere)
    _check_files(experiment, path, elsewhere)
    deepspeed = _read_deepspeed(config / "deepspeed" / f"{experiment.training.deepspeed}.json", path)
    return value, experiment.model_copy(update={"deepspeed": deepspeed})


def _check_files(experiment: Experiment, path: Path, elsewhere: dict[tuple[str, str], Path]) -> None:
    """Raise DvpError unless the files of its sources, and the folder of its base model, are there."""
    for name in (experiment.data.train, *experiment.data.evaluation):
        source = experiment.sources[name]
        if isinstance(source, FileSource) and not source.path.is_file():
            where = elsewhere.get(("sources", name), path)
            raise DvpError(f"{where}: sources.{name}.path: {source.path}: no such file")
    if isinstance(experiment.base, LocalBase) and not (Path(experiment.base.path) / "config.json").is_file():
        raise DvpError(
            f"{path}: base.path: {experiment.base.path}: expected a Hugging Face model directory, found no config.json"
        )


def _check_whole(value: dict, path: Path) -> None:
    """Raise DvpError for an experiment that lacks more than one key and extends no other: most likely it should."""
    fields = Experiment.model_fields
    lacks = [key for key, field in fields.items() if field.is_required() and key not in {*value, *TABLES}]
    if len(lacks) > 1 and not value.keys() - fields.keys():  # a key that is unknown may be the missing one
        raise DvpError(
            f"{path}: {', '.join(lacks)} are missing; one that changes another experiment names it, as in "
            "'extends: tiny'"
        )


def _path(name: Any, config: Path) -> Path:
    """The file of an experiment. Raises DvpError if there is none."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or name.endswith(".yaml"):
        raise DvpError(f"experiment '{name}': expected the name of a file in {config / 'experiments'}, without .yaml")
    path = config / "experiments" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in (config / "experiments").glob("*.yaml")))
        raise DvpError(f"{path}: no such experiment{f'; known are {known}' if known else _elsewhere(path)}")
    return path


def _read_experiment(name: Any, config: Path) -> tuple[Path, dict]:
    """An experiment's file as it is written. Raises DvpError."""
    path = _path(name, config)
    if name in RESERVED:
        raise DvpError(f"{path}: name: '{name}' is what something else in the folder of results is called")
    value = read_yaml(path)
    if value.get("name") != name:
        raise DvpError(f"{path}: name: expected '{name}', as the file is called, found {value.get('name')!r}")
    if "deepspeed" in value:
        raise DvpError(f"{path}: deepspeed: unknown key; training.deepspeed names a file of {config / 'deepspeed'}")
    return path, value


def _merged(below: dict, above: dict) -> dict:
    """`above` laid over `below`; inherited keys that `above` sets to null are gone."""
    merged = dict(below)
    for key, value in above.items():
        inherited = below.get(key)
        if value is None and key in below:
            del merged[key]
        elif isinstance(value, dict) and isinstance(inherited, dict) and not _differ_in_kind(inherited, value):
            merged[key] = _merged(inherited, value)
        else:
            merged[key] = value
    return merged


def _differ_in_kind(below: dict, above: dict) -> bool:
    """Whether two mappings are of different kinds, such as a `generated` and a `hub` source, which share no keys."""
    return any(key in above and above[key] != below.get(key) for key in ("kind", "rule"))


def _read_deepspeed(file: Path, experiment: Path) -> dict[str, Any]:
    """A DeepSpeed file: a ZeRO stage, perhaps bf16 autocast, and no key that the experiment sets. Raises DvpError."""
    try:
        options = parse_json(file.read_text(encoding="utf-8"))
        zero = options["zero_optimization"]
        stage = zero["stage"]
    except FileNotFoundError:
        raise DvpError(f"{experiment}: training.deepspeed: {file} does not exist") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DvpError(
            f"{file}: expected JSON with zero_optimization.stage ({type(error).__name__}: {error})"
        ) from None
    if _levels(options) > DEEPEST:
        raise DvpError(f"{file}: nested too deeply, expected at most {DEEPEST} levels")
    if type(stage) is not int or stage not in (1, 2, 3):
        raise DvpError(f"{file}: zero_optimization.stage: expected 1, 2 or 3, found {stage!r}")
    if not zero.get("compute_grad_norm", True):
        raise DvpError(
            f"{file}: zero_optimization.compute_grad_norm: a step reports the norm of its gradient; remove it"
        )
    if options.get("torch_autocast", BF16_AUTOCAST) != BF16_AUTOCAST:
        raise DvpError(f"{file}: torch_autocast: expected {json.dumps(BF16_AUTOCAST)} or no such key")
    for key in options:
        if key not in OF_DEEPSPEED:
            raise DvpError(f"{file}: {key}: expected {' and '.join(OF_DEEPSPEED)} alone; `training` sets the rest")
    return options


def _levels(value: Any) -> int:
    """How deep lists and mappings are nested."""
    count, inside = 0, [value]
    while inside := [outer for outer in inside if isinstance(outer, dict | list)]:
        count += 1
        inside = [inner for outer in inside for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return count


def _folder(value: str) -> str:
    """A folder as Snakemake has it in its paths: it warns of each that has ./ or // in it."""
    if set("{}") & set(value) or not value.isprintable():
        raise ValueError(f"expected a folder in one line without braces, which Snakemake reads, found {value!r}")
    try:
        path = Path(value).expanduser()
    except RuntimeError:
        raise ValueError(f"expected a folder, but whose home is {value.partition('/')[0]}?") from None
    if not path.name:
        raise ValueError(f"expected a folder for results alone, found {value!r}")
    return str(path)


class Settings(Strict):
    """config/config.yaml: which experiment, where results go, and which experiments answer config/claims.yaml."""

    experiment: Given
    results: Annotated[Given, AfterValidator(_folder)]
    evidence: Annotated[dict[str, Given], Field(min_length=1)]


def check_settings(settings: dict) -> Settings:
    """What Snakemake has read of config/config.yaml, --configfile and --config. Raises DvpError."""
    checked = _parse_settings(settings, "config/config.yaml, --configfile or --config")
    for folder in (Path(checked.results), Path(checked.results) / checked.experiment):
        if folder.exists() and not folder.is_dir():
            raise DvpError(f"{folder}: expected a folder, found a file")
    return checked


def read_settings(pairs: list[str], config: Path = Path("config")) -> dict[str, str]:
    """`experiment` and `results` of config/config.yaml with KEY=VALUE pairs on top, as Snakemake's --config has them.

    Raises DvpError.
    """
    file = config / "config.yaml"
    settings = _parse_settings(read_yaml(file), file).model_dump()
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in ("experiment", "results"):
            raise DvpError(f"--config {pair}: expected KEY=VALUE with one of the keys experiment, results")
        if not value:
            raise DvpError(f"--config {pair}: expected KEY=VALUE, found no value")
        settings[key] = value
    return _parse_settings(settings, "--config").model_dump(exclude={"evidence"})


def _parse_settings(settings: dict, where: Path | str) -> Settings:
    try:
        return Settings.model_validate(settings)
    except ValidationError as error:
        raise DvpError(f"{where}: {first_problem(error, settings, Settings)[1]}") from None


def read_resolved(path: Path) -> Experiment:
    """The resolved experiment that `dvp resolve` wrote. Raises DvpError."""
    value = read_yaml(path)
    if "extends" in value or not value.keys() >= set(TABLES):
        raise DvpError(f"{path}: not a resolved experiment; expected one that dvp wrote, results/NAME/config.yaml")
    return parse_experiment(value, path)


def dump_experiment(experiment: Experiment) -> str:
    """An experiment as YAML that `read_resolved` reads back unchanged."""
    return yaml.dump(experiment.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def write_resolved(experiment: Experiment, folder: Path) -> None:
    """Write an experiment's config.yaml, with those entries of the catalogue that it uses.

    One that is there and says the same is left as it is, its age included. Raises DvpError for another experiment's.
    """
    path, text = folder / "config.yaml", dump_experiment(experiment.used)
    if path.is_file() and path.read_bytes() == text.encode():
        return
    try:
        other = read_yaml(path).get("name")
    except DvpError:  # there is none, or it is of no use
        other = experiment.name
    if other != experiment.name:
        raise DvpError(f"{path}: is of experiment '{other}'; expected a folder of its own for '{experiment.name}'")
    write_text(path, text)
