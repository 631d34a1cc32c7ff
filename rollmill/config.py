"""The run file: TOML to one typed, frozen configuration. Unknown keys are errors that name the nearest known key."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rollmill import algorithms


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class RunSection(Section):
    dir: Path = Path("runs/default")
    """Where everything of this run is kept."""
    seed: int = Field(0, ge=0)
    """Decides tasks and samples."""
    steps: int = Field(100, ge=1)
    """Optimiser steps to take."""
    mode: Literal["async", "sync"] = "async"
    """sync = the same code with staleness 0 and a barrier after each step."""


class ModelSection(Section):
    path: Path
    """A Hugging Face safetensors directory: where training starts."""
    numerics: Literal["exact", "fast", "fp8", "nvfp4"] = "exact"
    """exact: a token's logprob is the same bits in engine and trainer, whatever else is in the batch; fast: what torch does;
    fp8, nvfp4: exact with quantised linear layers."""


class TasksSection(Section):
    family: str = "repo"
    """Who makes and grades the tasks."""
    kinds: tuple[str, ...] = ()
    """Only these kinds; empty = all."""
    levels: tuple[int, ...] = (1,)
    """Difficulty levels to draw from."""
    num_heldout: int = Field(128, ge=0)
    """Held-out tasks tried before and after training; 0 = none."""
    curriculum: Literal["even", "target"] = "even"
    """even: kinds and levels alike; target: those that the policy solves sometimes are drawn more often."""
    curriculum_band: tuple[float, float] = (0.2, 0.8)
    """target: the solve rates that are wanted."""
    curriculum_passes: int = Field(1, ge=1)
    """target: how often a task of a family that lists its tasks may be given."""

    @model_validator(mode="after")
    def _curriculum(self) -> TasksSection:
        low, high = self.curriculum_band
        if not 0 < low < high < 1:
            raise ValueError(f"curriculum_band is [{low}, {high}]; give two solve rates with 0 < first < second < 1")
        for name in ("curriculum_band", "curriculum_passes"):
            if self.curriculum == "even" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f'{name} means nothing with curriculum = "even"; leave it out or set curriculum = "target"')
        return self


class RolloutSection(Section):
    group_size: int = Field(8, ge=2)
    """Attempts at each task, compared with each other."""
    max_running: int = Field(64, ge=1)
    """Most episodes at once; the controller moves below this."""
    temperature: float = Field(1.0, gt=0)
    max_turns: int = Field(8, ge=1)
    """Model turns per episode."""
    max_bad_calls: int = Field(3, ge=1)
    """Replies that are no valid tool call after which an episode ends."""
    max_tokens_per_turn: int = Field(128, ge=1)
    episode_s: float = Field(120.0, gt=0)
    """An episode older than this is cancelled and tried again."""
    tool_s: float = Field(10.0, gt=0)
    """A tool call older than this is stopped and the agent told."""
    max_retries: int = Field(3, ge=0)
    """How often an attempt that failed outside the agent's control is repeated."""
    sandbox: str = "namespace"
    """Which sandbox backend."""
    tool_latency_s: tuple[float, float] = (0.0, 0.0)
    """Extra seconds every tool call really takes, drawn evenly from this range: for benchmarks of slow tools."""


class AgentSection(Section):
    """Who plays an episode: the default harness, a program of yours, or a service of yours."""

    kind: Literal["default", "program", "remote"] = "default"
    """default: our own harness; program: any program that speaks to a model over HTTP; remote: a service that plays whole episodes."""
    command: tuple[str, ...] = ()
    """program: what to run; `{instruction}`, `{task}` (a JSON file) and `{model}` are filled in."""
    where: Literal["inside", "beside"] = "inside"
    """program: inside the episode's box, or beside it: on this machine, with your rights."""
    env: dict[str, str] = {}
    """program: added to its environment."""
    stdin: bool = False
    """program: the instruction is also its standard input."""
    graded_exit_codes: tuple[int, ...] = (0,)
    """program: any other exit code is a failure, which is tried again and never graded; empty: all are graded."""
    time_s: float = Field(0.0, ge=0)
    """program: stopped after so many seconds, and what it left is graded; 0: at `rollout.episode_s`, which counts as a failure of ours."""
    image: str = ""
    """program, inside: the image of the box instead of the family's."""
    site: str = ""
    """program, inside: a folder of installed Python packages on this machine, shown to the box and put on PYTHONPATH."""
    memory_mb: int = Field(0, ge=0)
    """program, inside: the box's memory; 0: the family's."""
    url: str = ""
    """remote: where the service answers."""
    key_env: str = ""
    """remote: the environment variable that holds the service's key, sent as a bearer token."""
    poll_s: float = Field(0.0, ge=0)
    """remote: ask the service for its status this often; 0: it reports to us."""
    model: str = "policy"
    """The model name that the agent is told; every name it asks for means the policy."""
    host: str = "127.0.0.1"
    """Where the gateway listens for the agent's model calls."""
    port: int = Field(0, ge=0, le=65535)
    """0 = any free one."""
    public_url: str = ""
    """remote: how the service reaches the gateway, when that is not `http://host:port`."""

    @model_validator(mode="after")
    def _agree(self) -> AgentSection:
        inside, beside = ("image", "site", "memory_mb"), ("command", "where", "env", "stdin", "graded_exit_codes", "time_s")
        gateway, remote = ("model", "host", "port"), ("url", "key_env", "poll_s", "public_url")
        mine = {"default": (), "program": (*beside, *inside, *gateway), "remote": (*remote, *gateway)}[self.kind]
        for name, field in type(self).model_fields.items():
            if name != "kind" and name not in mine and getattr(self, name) != field.default:
                raise ValueError(f"{name} means nothing with kind = {self.kind!r}; leave it out or set another kind")
        if self.kind == "program" and not self.command:
            raise ValueError('kind = "program" needs a command; give one as a list, e.g. command = ["python3", "agent.py"]')
        if self.kind == "program" and self.where == "beside" and (bad := [n for n in inside if getattr(self, n)]):
            raise ValueError(f'{bad[0]} is for where = "inside"; beside the box there is no box')
        if self.site and not Path(self.site).is_dir():
            raise ValueError(f"site = {self.site!r} is no folder of this machine")
        if self.kind == "remote" and not self.url.startswith(("http://", "https://")):
            raise ValueError(f'kind = "remote" needs the url of the service, with http:// or https://; it is {self.url!r}')
        return self


class TrainerSection(Section):
    groups_per_batch: int = Field(8, ge=1)
    lr: float = Field(1e-6, gt=0)
    warmup_steps: int = Field(5, ge=0)
    lr_final_frac: float = Field(1.0, gt=0, le=1)
    """The learning rate falls evenly to this share of `lr` at the last step; 1 keeps it constant."""
    adam_eps: float = Field(1e-15, gt=0)
    """AdamW's floor. Near the usual gradient of one weight it keeps weights that carry no signal from wandering."""
    clip_norm: float = Field(1.0, gt=0)
    """The gradient's global norm is cut here. Set it near the usual norm, so that one wild batch moves little."""
    max_staleness: int | Literal["auto"] = 4
    """A group whose oldest token is more than this many weight versions old is dropped, never trained; auto: chosen by measurement."""
    staleness_limit: int = Field(8, ge=1)
    """auto: never above this; only what is older is dropped."""
    loss: str = "dppo_tv"
    """The policy loss, by name."""
    loss_options: dict[str, Any] = {}
    """Options of that loss; what is not given has its default."""
    corrections: tuple[str, ...] = ("veto", "opsm")
    """What keeps tokens and windows from teaching, or weighs them, whatever the loss."""
    correction_options: dict[str, dict[str, Any]] = {}
    """A table of options for each of them."""
    aggregation: Literal["loss", "constant", "token_mean", "sequence_mean"] = "loss"
    """How tokens are summed up: constant = divided by episodes and length_norm; token_mean = by sampled tokens; sequence_mean = by the
    tokens of each episode, then by episodes; loss = as the loss was published."""
    minibatches: int = Field(1, ge=1)
    """Updates per step, each on its share of the batch; a version is published after the last."""
    kl_ref: float = Field(0.0, ge=0)
    """What a nat of divergence from the model that training started from takes from a token's advantage; 0: off, no second model."""
    advantage: str = "leave_one_out"
    """How the rewards of a group become advantages, by name."""
    advantage_options: dict[str, Any] = {}
    """Options of that advantage; what is not given has its default."""
    effort: dict[str, Any] = {}
    """What the effort of an episode takes from its reward; empty: nothing."""
    router_replay: Literal["off", "r3", "r3_plausible"] = "off"
    """Models with experts: off = the router chooses anew; r3 = the experts that the engine took are imposed; r3_plausible = those
    that the router finds plausible now."""
    length_norm: float = Field(64.0, gt=0)
    """The constant every episode's token sum is divided by (not its own length)."""
    checkpoint_every: int = Field(1, ge=1)
    """Steps between checkpoints. Work since the last one is repeated after a crash, never lost or doubled."""
    tokens_per_microbatch: int = Field(8192, ge=256)
    num_threads: int = Field(1, ge=1)
    recompute_layers: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again: less memory, a third more work, the same bits."""
    device: str = "cpu"
    """Where the model in training lies: cpu, cuda or cuda:1."""
    batch_s: float = Field(600.0, gt=0)
    """The trainer gives up, naming who it waits for, when no batch is ready for this long."""

    @field_validator("max_staleness", mode="before")
    @classmethod
    def _bound(cls, value: object) -> object:
        if value != "auto" and (type(value) is not int or value < 0):
            raise ValueError('give a number of weight versions, 0 or more, or "auto"')
        return value

    @model_validator(mode="after")
    def _limit(self) -> TrainerSection:
        if self.max_staleness != "auto" and self.staleness_limit != type(self).model_fields["staleness_limit"].default:
            raise ValueError(f'staleness_limit means nothing with max_staleness = {self.max_staleness}; leave it out or set "auto"')
        return self

    @model_validator(mode="after")
    def _algorithms(self) -> TrainerSection:
        loss = algorithms.loss_options(self.loss, self.loss_options)
        algorithms.corrections_of(self.corrections, self.correction_options, loss)
        algorithms.advantage_options(self.advantage, self.advantage_options)
        if algorithms.effort_options(self.effort).scale and self.advantage == "max_rl":
            raise ValueError("trainer.effort makes rewards negative, which the advantage 'max_rl' cannot divide by; use one of the two")
        return self


class EngineSection(Section):
    num_replicas: int = Field(1, ge=1)
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    """First port; replica i takes port + i. 0 = any free one."""
    num_slots: int = Field(64, ge=1)
    """Sequences decoded at once."""
    max_len: int = Field(512, ge=16)
    """Longest context in tokens."""
    num_pages: int = Field(0, ge=0)
    """Pages of 64 tokens for keys and values; 0 = room for every slot at full length, or what memory allows."""
    swap: Literal["keep_kv", "re_prefill"] = "keep_kv"
    """What becomes of running requests' contexts when new weights arrive: kept, or computed again so that every token is exact."""
    numerics: Literal["", "exact", "fast", "fp8", "nvfp4", "noisy"] = ""
    """Another profile than the model's for the engine alone; noisy shows what replay and correction are worth."""
    num_threads: int = Field(1, ge=1)
    device: str = "cpu"
    """Where the model that is served lies: cpu, cuda or cuda:1."""


class WeightsSection(Section):
    store: str = ""
    """Where versions lie: a directory, or a bucket as `s3://bucket/prefix?endpoint=...`; empty: `weights/` in the run directory."""
    peers: bool = False
    """A starting replica may read the weights from one that serves them; their ports then hand out the weights to whoever asks."""
    compact_every_s: float = Field(20.0, ge=0)
    """Seconds between two looks of the compactor role, which makes folds and anchors; 0: no such role."""
    collect_after_s: float = Field(0.0, ge=0)
    """What no replica, tag or late joiner needs is deleted after this grace, in seconds, by the compactor role; 0: never."""


class RunConfig(Section):
    """A whole run."""

    run: RunSection = RunSection()
    model: ModelSection
    tasks: TasksSection = TasksSection()
    rollout: RolloutSection = RolloutSection()
    agent: AgentSection = AgentSection()
    trainer: TrainerSection = TrainerSection()
    engine: EngineSection = EngineSection()
    weights: WeightsSection = WeightsSection()

    @model_validator(mode="after")
    def _agree(self) -> RunConfig:
        if self.run.mode == "async" and self.max_staleness < 1:
            raise ValueError("trainer.max_staleness is 0 but run.mode is 'async'; set run.mode = \"sync\" or trainer.max_staleness >= 1")
        if self.agent.time_s >= self.rollout.episode_s:
            raise ValueError(
                f"agent.time_s is {self.agent.time_s} s, an episode ends after rollout.episode_s = {self.rollout.episode_s} s; lower it"
            )
        lo, hi = self.rollout.tool_latency_s
        if not 0 <= lo <= hi:
            raise ValueError(f"rollout.tool_latency_s is [{lo}, {hi}]; give two numbers with 0 <= first <= second")
        if self.engine.port and self.engine.port + self.engine.num_replicas > 65536:
            raise ValueError(f"engine.port {self.engine.port} leaves no room for {self.engine.num_replicas} replicas below port 65536")
        return self

    @property
    def weight_store(self) -> str:
        """Where the run's versions lie."""
        return self.weights.store or str(self.run.dir / "weights")

    @property
    def max_staleness(self) -> int:
        """The bound beyond which groups are dropped: 0 in sync mode, the limit when the bound is chosen by measurement."""
        if self.run.mode == "sync":
            return 0
        return self.trainer.staleness_limit if self.trainer.max_staleness == "auto" else self.trainer.max_staleness

    @property
    def is_staleness_auto(self) -> bool:
        """Whether the bound in force is chosen by measurement."""
        return self.run.mode == "async" and self.trainer.max_staleness == "auto"


class ConfigError(ValueError):
    """A run file or override that cannot be used; the text says where and what to change."""


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> RunConfig:
    """Read a run file and apply `a.b=value` overrides, whose values are TOML (bare words are strings)."""
    if not path.is_file():
        raise ConfigError(f"there is no run file {path}")
    try:
        raw = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for override in overrides:
        _apply(raw, override)
    return parse_config(raw, str(path))


def parse_config(raw: dict[str, Any], where: str) -> RunConfig:
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{where}: {_explain(e)}" for e in error.errors())) from error


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as a run file that can be fed back in."""
    return tomli_w.dumps(config.model_dump(mode="json"))


def known_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """Every dotted key of the run file."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            keys += [f"{prefix}{name}", *known_keys(kind, f"{prefix}{name}.")]
        else:
            keys.append(f"{prefix}{name}")
    return keys


def _apply(raw: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise ConfigError(f"--set {override!r} has no '='; write --set trainer.lr=1e-5")
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, leaf = key.split(".")
    table = raw
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is a value, not a section")
    table[leaf] = value


def _explain(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = [*known_keys(), *(f"trainer.loss_options.{name}" for kind in algorithms.LOSSES.values() for name in kind.__struct_fields__)]
        near = difflib.get_close_matches(key, known, 1, 0.0)
        leaf = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
        return f"unknown key {key!r}; the nearest known key is {(leaf or near)[0]!r}"
    if error["type"] == "missing":
        return f"{key!r} is missing; add it to the run file"
    if not key or (error["type"] == "value_error" and isinstance(error["input"], dict)):
        return (f"[{key}] " if key else "") + str(error["msg"]).removeprefix("Value error, ")
    why = str(error["msg"]).removeprefix("Value error, ")
    return f"{key} = {error['input']!r} is not usable: {why[0].lower()}{why[1:]}"
