"""What the ZeRO stages of DeepSpeed share: reading the config, the list of tested keys, the trainer, checkpoints.

Internals that this file reaches into:
- `accelerator.state.deepspeed_plugin.deepspeed_config`, the dictionary that Accelerate passes to
  `deepspeed.initialize`. If it were read earlier, DeepSpeed's bf16 mode would cast U, L and R: `RequireFp32` raises at
  the first step, and tests/plugin/test_several_processes.py trains with it.
- The names of the files in a checkpoint's `global_step*` folder, and `ds_config` in the optimizer's. If they changed,
  `check_optimizer_state` would refuse every resumed run: tests/plugin/test_several_processes.py resumes some.
"""

import importlib.util
import json
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

from ..method.config_error import ConfigError
from .engine import Engine
from .optimizer_state import partition_files, start_anew

AUTO = "auto"
_OFF: tuple[Any, ...] = (None, False, AUTO)


class _Allowed(NamedTuple):
    """Tested values of a DeepSpeed key (None: all), and why others are refused."""

    values: tuple[Any, ...] | None
    why: str = "it was not tested. Remove it"

    def takes(self, value: Any) -> bool:
        return self.values is None or any(value is each or value == each for each in self.values)


_ANY = _Allowed(None)


def _only(*values: Any, why: str = "it was not tested. Remove it") -> _Allowed:
    return _Allowed((None, *values), why)


def _off(why: str) -> _Allowed:
    """Tested only while switched off."""
    return _Allowed(_OFF, why)


_OFF_ONLY = _off("it was not tested. Remove it")

_REDUCED_EARLY = (
    "it was not tested: gradients of layers that are gathered together are reduced before they are there, where the "
    "input needs none. Remove it"
)

TESTED_KEYS: dict[str, _Allowed] = {
    # To allow a key, add a line: its dotted name, without `stage3_`, and the tested values. `.*` is all of a section.
    "train_batch_size": _ANY,
    "train_micro_batch_size_per_gpu": _ANY,
    "gradient_accumulation_steps": _ANY,
    "gradient_clipping": _ANY,
    "steps_per_print": _ANY,
    "wall_clock_breakdown": _ANY,
    # These change nothing at DeepSpeed's defaults.
    "prescale_gradients": _OFF_ONLY,
    "memory_breakdown": _OFF_ONLY,
    "gradient_predivide_factor": _only(1.0),
    "zero_allow_untested_optimizer": _ANY,
    "zero_force_ds_cpu_optimizer": _ANY,
    "zero_optimization.stage": _only(1, 2, 3),
    "zero_optimization.contiguous_gradients": _ANY,
    "zero_optimization.overlap_comm": _ANY,
    "zero_optimization.reduce_scatter": _only(True),
    "zero_optimization.reduce_bucket_size": _ANY,
    "zero_optimization.allgather_partitions": _only(True),
    "zero_optimization.allgather_bucket_size": _ANY,
    "zero_optimization.allgather_sequential": _ANY,
    "zero_optimization.sub_group_size": _ANY,
    "zero_optimization.prefetch_bucket_size": _ANY,
    "zero_optimization.param_persistence_threshold": _ANY,
    "zero_optimization.max_live_parameters": _ANY,
    "zero_optimization.max_reuse_distance": _ANY,
    "zero_optimization.gather_16bit_weights_on_model_save": _ANY,
    "zero_optimization.gather_fp16_weights_on_model_save": _ANY,
    "zero_optimization.round_robin_gradients": _only(False),
    # Would shard the base over fewer than all processes.
    "zero_optimization.zero_hpz_partition_size": _only(1),
    "zero_optimization.mics_shard_size": _only(-1),
    # Would round what is trained, or its gradients.
    "communication_data_type": _only("fp32", why="it rounds the gradients of U, L and R, which are fp32. Remove it"),
    "data_types.grad_accum_dtype": _only(
        "fp32", why="it rounds the gradients of U, L and R, which are fp32. Remove it"
    ),
    "bf16.enabled": _off(
        'DeepSpeed would cast U, L and R to bf16. Write "auto": with bf16: true in the YAML the model then computes '
        "under DeepSpeed's torch_autocast, and U, L and R stay fp32"
    ),
    "bf16.*": _ANY,  # not read while bf16.enabled is off
    "fp16.enabled": _off("DeepSpeed would cast U, L and R to fp16. Remove it, and use bf16: true in the YAML"),
    "fp16.*": _ANY,
    "amp.enabled": _off(
        "it is Apex's mixed precision, which casts U, L and R. Remove it, and use bf16: true in the YAML"
    ),
    "amp.*": _ANY,
    "torch_autocast": _off("the plugin writes it as bf16 in the YAML says. Remove it"),
    "zero_optimization.zero_quantized_weights": _off("it rounds what is trained. Remove it"),
    "zero_optimization.zero_quantized_nontrainable_weights": _off(
        "it rounds the base, which the scores are computed from. Remove it"
    ),
    "zero_optimization.zero_quantized_gradients": _off("it rounds the gradients. Remove it"),
    "compression_training": _off("it prunes or quantizes what is trained. Remove it"),
    # Would replace what the YAML says.
    "optimizer": _off("it would take the place of the YAML's optimizer, and of sparse_lr and lr_groups. Remove it"),
    "scheduler": _off("it would take the place of the YAML's lr_scheduler. Remove it"),
    # Not tested, with more to say than that.
    "zero_optimization.offload_optimizer": _off("it was not tested, and an adapter's state is small. Remove it"),
    "zero_optimization.cpu_offload": _off("it was not tested, and an adapter's state is small. Remove it"),
    "zero_optimization.offload_param": _off("it was not tested. Remove it"),
    "zero_optimization.cpu_offload_param": _off("it was not tested. Remove it"),
    "zero_optimization.module_granularity_threshold": _off(_REDUCED_EARLY),
    "zero_optimization.leaf_module": _off(_REDUCED_EARLY),
    "zero_optimization.use_all_reduce_for_fetch_params": _off(
        "what is fetched together must be of one dtype there, and an adapted layer has two: U, L and R are fp32. "
        "Remove it"
    ),
}
"""DeepSpeed keys → the values that were tested. Every other key is refused."""

_REFUSED_BESIDE: dict[str, str] = {
    "fsdp_config": "a run has one engine. Remove one of them",
    "fp16": "DeepSpeed would cast U, L and R to fp16; use bf16: true",
    "torch_compile": "it was not tested. Remove one of them",
    "deepcompile": "it was not tested. Remove it",
    "load_in_4bit": "it was not tested; DDP keeps the quantized base on every GPU, as ZeRO-1 and ZeRO-2 would",
    "load_in_8bit": "it was not tested; DDP keeps the quantized base on every GPU, as ZeRO-1 and ZeRO-2 would",
    "lora_modules_to_save": "DeepSpeed joins all that is trained in one tensor, and these modules are of the base's "
    "dtype; use DDP or FSDP2",
}


def read_config(named: Any) -> Mapping[str, Any]:
    """The DeepSpeed config that the YAML's `deepspeed` is, or names.

    Raises:
        ValueError: a file that is not there, or no JSON.
    """
    if isinstance(named, Mapping):
        return named
    try:
        with open(named, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError("deepspeed", f"{named} cannot be read as a DeepSpeed config: {error}.") from error


def stage_of(config: Mapping[str, Any]) -> int:
    """The ZeRO stage of a DeepSpeed config, 0 to 3; 0 shards nothing.

    Raises:
        ValueError: it is none of these.
    """
    stage = (config.get("zero_optimization") or {}).get("stage")
    if stage not in (None, 0, 1, 2, 3):
        raise ConfigError("deepspeed", f"zero_optimization.stage: {stage} is none of 0 to 3. Write 1, 2 or 3.")
    return int(stage or 0)


def check_keys(config: Mapping[str, Any], adapter: str) -> None:
    """Raise ValueError, with key, value and remedy, for the first setting that is not in `TESTED_KEYS`."""
    for key, value in _settings(config):
        plain = key.replace(".stage3_", ".").replace("bfloat16.", "bf16.")
        allowed = TESTED_KEYS.get(plain) or TESTED_KEYS.get(plain.rpartition(".")[0] + ".*") or _only()
        if not allowed.takes(value):
            raise ConfigError("deepspeed", f"{key}: {value} does not work with adapter: {adapter}: {allowed.why}.")


def _settings(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values: of every section that has keys in `TESTED_KEYS`, else of the section as a whole."""
    sections = {name.rpartition(".")[0] for name in TESTED_KEYS} | {"bfloat16"}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key in sections:
            yield from _settings(value, f"{key}.")
        elif isinstance(value, Mapping) and (value.get("device") == "none" or _is_switched_off(key, value)):
            continue
        else:
            yield key, value


def _is_switched_off(key: str, section: Mapping[str, Any]) -> bool:
    return key not in TESTED_KEYS and section.get("enabled") is False


class DeepSpeed(Engine):
    """The base class of the ZeRO stages.

    Attributes:
        part_files: whether every process writes a file of its own for the model's state, as stage 3 does.
    """

    key = "deepspeed"
    shards_optimizer = True
    gradient_refusal = "it was not tested"
    part_files: bool = False

    @property
    def zero(self) -> Mapping[str, Any]:
        """The section `zero_optimization`."""
        return self.settings.get("zero_optimization") or {}

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return stage_of(self.settings)

    def check_settings(self, cfg: MutableMapping[str, Any]) -> None:
        """Refuse DeepSpeed keys that were not tested, and YAML keys that were not beside DeepSpeed."""
        if not self.stage:
            raise ConfigError(
                "deepspeed",
                f"zero_optimization.stage: {self.zero.get('stage')} shards nothing; write 1, 2 or 3, or "
                "remove deepspeed (DDP).",
            )
        check_keys(self.settings, cfg["adapter"])
        for key, reason in _REFUSED_BESIDE.items():
            if cfg.get(key):
                raise ConfigError(
                    key, f"{cfg[key]} does not work with deepspeed and adapter: {cfg['adapter']}: {reason}."
                )

    def leave_out(self, cfg: MutableMapping[str, Any]) -> None:
        """Else Axolotl would start DeepSpeed, and under ZeRO-3 load a base without weights."""
        cfg["deepspeed"] = None

    def check_installed(self) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise ConfigError(
                "deepspeed",
                "DeepSpeed is not installed. Install the extra of axolotl-supertune, pip install "
                "'axolotl-supertune[deepspeed]' (in a checkout: pip install -e '.[deepspeed]'), or remove the key "
                "(DDP).",
            )

    def prepare_trainer(self, trainer: Any) -> None:
        """Have DeepSpeed compute in bf16 under autocast, as one GPU does, and leave U, L and R in fp32.

        Its own bf16 mode casts the whole model, and Accelerate switches that on if the config says nothing of bf16.

        Raises:
            ValueError: DeepSpeed is not what trains.
        """
        plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
        if plugin is None:
            raise ConfigError(
                "deepspeed", "this run would train without it, on the CPU. Remove the key, or unset ACCELERATE_USE_CPU."
            )
        config = plugin.deepspeed_config
        config["bf16"] = {"enabled": False}
        # An empty list of modules: none has its gradients reduced in bf16.
        config["torch_autocast"] = {
            "enabled": bool(trainer.args.bf16),
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        }
        config.setdefault("gradient_clipping", trainer.args.max_grad_norm or 0.0)  # else max_grad_norm has no effect

    def check_optimizer_state(self, folder: Path) -> None:
        """As `Engine`: DeepSpeed says little of what it cannot load, and loads as many parts as were written."""
        ranks = partition_files(folder)
        if not ranks:
            raise ConfigError(
                "resume_from_checkpoint",
                f"{folder} has no optimizer state of DeepSpeed, so it was written without it. "
                "Remove deepspeed to resume it.",
            )
        # A lost part does not say that it is lost; but every process also writes the state of its generators.
        parts = max(len(list(folder.glob("rng_state*.pth"))), max(ranks) + 1)
        if parts != self.processes:
            raise ConfigError(
                "resume_from_checkpoint",
                f"the optimizer state in {folder} is in {parts} parts, one a process, and "
                f"DeepSpeed loads it in as many only; these are {self.processes}. Start {parts}.",
            )
        step = next(iter(ranks.values())).parent
        optimizers = [step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(parts)]
        models = [step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(parts)]
        part_files = any(path.is_file() for path in models)
        if not part_files:
            models = [step / "mp_rank_00_model_states.pt"]  # one for all processes
        missing = [path for path in (folder / "latest", *optimizers, *models) if not path.is_file()]
        if missing:
            raise ConfigError(
                "resume_from_checkpoint",
                f"{folder} is incomplete, it has no {missing[0].relative_to(folder)}, a part "
                f"of DeepSpeed's state. Delete it to resume from the one before, or {start_anew(folder)}.",
            )
        if part_files != self.part_files:
            stages, values = ("ZeRO-3", "3") if part_files else ("ZeRO-1 or ZeRO-2", "1 or 2")
            raise ConfigError(
                "resume_from_checkpoint",
                f"{folder} was written under {stages}, and deepspeed says "
                f"zero_optimization.stage: {self.stage}, which reads another layout. Set it to {values} to "
                f"resume, or {start_anew(folder)}.",
            )
        self.check_partition(folder, optimizers[0])

    def check_partition(self, folder: Path, optimizer: Path) -> None:
        """Check how the optimizer's state in a checkpoint is partitioned, from the file of process 0."""

    # --- `plan` ---

    @property
    def offloads_weights(self) -> bool:
        return self._offloads("param")

    @property
    def offloads_optimizer(self) -> bool:
        return self._offloads("optimizer")

    def _offloads(self, what: str) -> bool:
        return (self.zero.get(f"offload_{what}") or {}).get("device", "none") != "none"

    @property
    def overlaps(self) -> bool:
        """Whether a second reduction bucket is filled while the first is reduced."""
        return bool(self.zero.get("overlap_comm"))

    def bucket(self, hidden: int) -> int:
        """Scalars of the reduction bucket."""
        value = self.zero.get("reduce_bucket_size", 500_000_000)
        return hidden**2 if value == AUTO else int(value)  # as transformers fills in "auto"

    @property
    def live(self) -> int:
        """Scalars that stay gathered at most, prefetched ones included."""
        value = next(
            (self.zero[key] for key in ("stage3_max_live_parameters", "max_live_parameters") if key in self.zero),
            1_050_000_000,
        )
        return -1 if value == AUTO else int(value)

    def master_bytes(self, trained: float) -> float:
        """Every process keeps an fp32 master copy of its part of what is trained."""
        return trained / self.optimizer_shards

    def reduction_bytes(self, gradients: float, width: int, hidden: int) -> float:
        return self.bucket(hidden) * width * (2.0 if self.overlaps else 1.0)

    def planned(self, hidden: int) -> dict[str, Any]:
        return super().planned(hidden) | {
            "bucket": self.bucket(hidden),
            "overlaps": self.overlaps,
            "live": self.live,
        }
