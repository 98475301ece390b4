"""A script of Accelerate that does not know ds_lgamp: trains a small model of its own on random numbers."""

import torch
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
print(f"RESULT {accelerator.num_processes} {type(model).__name__}", flush=True)
