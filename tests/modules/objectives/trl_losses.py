"""TRL's GRPOTrainer on given tensors. Runs in the environment that `make trl` builds; imports nothing of this project.

    .venv-trl/bin/python tests/modules/objectives/trl_losses.py INPUTS OUTPUTS

INPUTS: {"tensors": logprobs, old, reference, mask [B, L], advantages [B]; "cases": {name: GRPOConfig arguments}}.
OUTPUTS: {name: (loss, its gradient by the log-probabilities [B, L])}.
"""

import os
import sys
import tempfile
from typing import Any

import torch

os.environ["HF_HUB_OFFLINE"] = "1"


def main(source: str, target: str) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
    from trl import GRPOConfig, GRPOTrainer

    given = torch.load(source)
    tensors: dict[str, torch.Tensor] = given["tensors"]
    rows, length = tensors["mask"].shape
    words = Tokenizer(models.WordLevel({"a": 0, "<pad>": 1, "<eos>": 2}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}
    model = AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=3, num_key_value_heads=1, **shape))
    found: dict[str, Any] = {}
    for name, options in given["cases"].items():
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)  # it loads the reference from there, where there is one
            arguments = GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=rows,
                num_generations=rows,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                **options,
            )
            trainer = GRPOTrainer(
                model=folder,
                reward_funcs=lambda completions, **unused: [0.0] * len(completions),
                args=arguments,
                train_dataset=Dataset.from_list([{"prompt": "a"}] * rows),
                processing_class=tokenizer,
            )
        logprobs = tensors["logprobs"].clone().requires_grad_()
        outputs = (logprobs, torch.zeros_like(logprobs), None)
        trainer._get_per_token_logps_and_entropies = lambda *unused, outputs=outputs, **more: outputs
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        ids = torch.zeros(rows, length, dtype=torch.int64)
        loss = trainer._compute_loss(
            trainer.model,
            {
                "prompt_ids": ids[:, :1],
                "prompt_mask": torch.ones_like(ids[:, :1]),
                "completion_ids": ids,
                "completion_mask": tensors["mask"].long(),
                "advantages": tensors["advantages"],
                "old_per_token_logps": tensors["old"],
                "ref_per_token_logps": tensors["reference"],
                "num_items_in_batch": tensors["mask"].sum(),
            },
        )
        loss.backward()
        found[name] = (loss.detach(), logprobs.grad)
    torch.save(found, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
