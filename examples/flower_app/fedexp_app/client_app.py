"""The client: an ordinary PyTorch loop. The two lines that are not ordinary are marked."""

from __future__ import annotations

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from fedexp.flower import LocalRule, report_client_id
from fedexp.flower.client_state import partition_of
from fedexp_app.settings import batches_of, model_of, setup_of, task_of


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
    task = task_of(context)
    client = partition_of(context, task.train.clients)
    setup, seed = setup_of(context, task), int(context.run_config["seed"])
    round = int(str(msg.content.config_records["config"]["server-round"]))

    model = model_of(task)
    model.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(
        model.parameters(), lr=setup.local.lr_at(round), weight_decay=setup.local.weight_decay
    )
    local = LocalRule(msg, context, model, optimizer)  # <- one

    model.train()
    losses = []
    for batch in batches_of(task, setup, seed, round, client):
        loss = cross_entropy(model(batch["x"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        if setup.local.clip_norm is not None:
            local.correct()  # only loops that clip: the corrected gradient is to be clipped
            clip_grad_norm_(model.parameters(), setup.local.clip_norm)
        optimizer.step()
        losses.append(loss.item())

    examples = len(task.train.client(client)["y"])
    return local.reply(
        {"num-examples": examples, "train_loss": sum(losses) / len(losses)}
    )  # <- two
