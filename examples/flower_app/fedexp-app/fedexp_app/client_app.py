"""The client: an ordinary PyTorch loop. The two lines that are not ordinary are marked."""

from __future__ import annotations

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from fedexp.flower import LocalRule, report_client_id
from fedexp_app.task import Net, load_data


def secure_if_asked(msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Secure sums where the configuration wants them. `mods=[secure_mod]` allows nothing else."""
    if context.run_config["secure"]:
        from fedexp.flower import secure_mod  # needs fedexp[flower-secure]

        return secure_mod(msg, context, call_next)
    return call_next(msg, context)


app = ClientApp(mods=[secure_if_asked])
report_client_id(app)  # the server learns the partition, so that sampling follows the seed


@app.train()
def train(msg: Message, context: Context) -> Message:
    config, data = context.run_config, load_data(context)
    model = Net()
    model.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=float(config["lr"]))
    local = LocalRule(msg, context, model, optimizer)  # <- one

    round = int(str(msg.content.config_records["config"]["server-round"]))
    partition = int(context.node_config["partition-id"])
    shuffle = torch.Generator().manual_seed(hash((int(config["seed"]), round, partition)))
    loader = DataLoader(data, int(config["batch-size"]), shuffle=True, generator=shuffle)

    model.train()
    losses = []
    for _ in range(int(config["local-epochs"])):
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return local.reply(
        {"num-examples": len(data), "train_loss": sum(losses) / len(losses)}
    )  # <- two
