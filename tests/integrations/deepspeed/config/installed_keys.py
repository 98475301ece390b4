"""The keys of a configuration that the installed DeepSpeed knows."""

import ast
import inspect
from functools import lru_cache
from textwrap import dedent

from pydantic import BaseModel


class Recorder(dict):
    """A configuration that records in ``read`` the dotted names of the keys that are looked up."""

    def __init__(self, values, read, path=""):
        super().__init__(
            {
                key: Recorder(value, read, f"{path}{key}.") if isinstance(value, dict) else value
                for key, value in values.items()
            }
        )
        self.read, self.path = read, path

    def __contains__(self, key):
        self.read.add(f"{self.path}{key}")
        return super().__contains__(key)

    def __getitem__(self, key):
        self.read.add(f"{self.path}{key}")
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.read.add(f"{self.path}{key}")
        return super().get(key, default)

    def keys(self):
        return self


def keys_read_by_the_configuration():
    """Returns the keys that DeepSpeedConfig reads from the configuration, and from sections that it reads key by
    key."""
    from deepspeed.runtime.config import DeepSpeedConfig

    sections = {
        "train_batch_size": 8,
        "zero_optimization": {},
        "optimizer": {"type": "Adam", "params": {}},
        "scheduler": {"type": "WarmupLR", "params": {}},
        "activation_checkpointing": {},
        "flops_profiler": {},
        "autotuning": {"model_info": None},
        "data_efficiency": {
            "data_sampling": {"curriculum_learning": {}, "dynamic_batching": {}},
            "data_routing": {"random_ltd": {}},
        },
        "checkpoint": {"parallel_write": {}, "writer": {}},
        "aio": {},
        "torch_autocast": {"dtype": "bf16", "lower_precision_safe_modules": []},
        "data_types": {},
        "timers": {"throughput": {}},
        "expert_parallel": {"enabled": False},
    }
    read = set()
    DeepSpeedConfig(Recorder(sections, read))
    DeepSpeedConfig(Recorder({"train_batch_size": 8, "zero_optimization": True}, read))
    return read


def names_of_models():
    """Returns the fields, by name and by alias, of sections that DeepSpeed reads with pydantic."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    models = {
        "": DeepSpeedMonitorConfig,
        "zero_optimization.": DeepSpeedZeroConfig,
        "fp16.": DeepSpeedFP16Config,
        "bf16.": DeepSpeedBF16Config,
        "comms_logger.": CommsLoggerConfig,
        "compile.": CompileConfig,
        "hybrid_engine.": HybridEngineConfig,
        "tensor_parallel.": TPTrainingConfig,
        "timers.throughput.": DeepSpeedThroughputTimerConfig,
        "weight_quantization.": WeightQuantConfig,
    }
    return {name for prefix, model in models.items() for name in model_names(model, prefix)}


def model_names(model, prefix):
    for name, field in model.model_fields.items():
        inner = [kind for kind in (field.annotation, *getattr(field.annotation, "__args__", ())) if is_model(kind)]
        for written in {name, field.alias or name}:
            yield f"{prefix}{written}"
            for kind in inner:
                yield from model_names(kind, f"{prefix}{written}.")


def is_model(kind):
    return inspect.isclass(kind) and issubclass(kind, BaseModel)


def keys_read_elsewhere():
    """Returns literal keys that ``initialize`` reads before it makes a DeepSpeedConfig, and those of ``pipeline``."""
    import deepspeed
    from deepspeed.runtime.config import get_pipeline_config
    from deepspeed.runtime.pipe.engine import PipelineEngine

    pipeline = set(get_pipeline_config({})) | literal_keys(PipelineEngine.__init__, "self._config.pipeline")
    return literal_keys(deepspeed.initialize, "config") | {f"pipeline.{name}" for name in pipeline}


def literal_keys(function, variable):
    """Returns the strings that ``function`` looks up in ``variable``: by index, with ``get``, or with ``in``."""
    found = set()
    for node in ast.walk(ast.parse(dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Subscript):
            container, key = node.value, node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            container, key = node.func.value, node.args[0]
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            container, key = node.comparators[0], node.left
        else:
            continue
        if ast.unparse(container) == variable and isinstance(key, ast.Constant):
            found.add(key.value)
    return found


@lru_cache
def names_of_deepspeed():
    return frozenset(keys_read_by_the_configuration() | names_of_models() | keys_read_elsewhere())
