"""Scripts that the tests explain."""

UNUSUAL_SCRIPT = """
import json, sys
import torch
from torch import distributed

distributed.init_process_group("gloo")
said = ["nothing"]
distributed.broadcast_object_list(said, src=1)
assert said == ["nothing"] and distributed.new_group([0, 1], backend="gloo").size() == 2
sent, got = torch.arange(3.0), torch.zeros(3)
distributed.all_to_all_single(got, sent, [1, 2], [1, 2])
assert got.equal(sent)
import deepspeed
deepspeed.init_distributed("gloo")
from deepspeed.pipe import LayerSpec, PipelineModule

class Picky(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        assert self.weight.sum().item() < 1e9, "needs data"

def engine(config):
    layers = [LayerSpec(torch.nn.Linear, 4, 4), torch.tanh, LayerSpec(Picky), LayerSpec(torch.nn.Linear, 4, 2)]
    net = PipelineModule(layers, num_stages=2, partition_method="uniform", loss_fn=torch.nn.functional.mse_loss)
    return deepspeed.initialize(model=net, config=config)[0]

print("a script may print")
try:
    made = engine(json.loads(sys.argv[1]))
finally:
    made.destroy()
"""
DATA_SCRIPT = """
import json, sys
import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch.utils.data import TensorDataset

class Picky(torch.nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) * (2 if sys.argv[2] == "picky" and hidden.sum() > 0 else 1)

deepspeed.init_distributed("gloo")
layers = [LayerSpec(Picky, 32, 32), torch.relu, LayerSpec(torch.nn.Linear, 32, 32), LayerSpec(torch.nn.Linear, 32, 2)]
if sys.argv[2] == "shared":
    layers.insert(2, LayerSpec(torch.nn.SyncBatchNorm, 32))
net = PipelineModule(layers, num_stages=2, partition_method="uniform", loss_fn=torch.nn.functional.cross_entropy)
data = TensorDataset(torch.zeros(9, 32, dtype=torch.bfloat16), torch.zeros(9, dtype=torch.long))
deepspeed.initialize(model=net, config=json.loads(sys.argv[1]), training_data=data)
"""
MODEL_SCRIPT = """
import json, sys
import deepspeed
import torch
import transformers
from deepspeed.pipe import PipelineModule

deepspeed.init_distributed("gloo")
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))
if sys.argv[2] == "by hand":
    body = model.model
    end = torch.nn.Sequential(body.norm, model.lm_head)
    model = PipelineModule([body.embed_tokens, *body.layers, end], num_stages=2, partition_method="uniform")
if sys.argv[2] == "experts":
    routers = {"num_local_experts": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "output_router_logits": True}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **routers))
if sys.argv[2] == "inside":
    around = torch.nn.Linear(64, 1)
    around.inside, model = model, around
optimizer = torch.optim.AdamW(model.parameters())
deepspeed.initialize(model=model, optimizer=optimizer, config=json.loads(sys.argv[1]))
"""
