"""The loops, a row each: tests run every one, and docs/loops.md shows them."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Loop:
    """One loop in two versions.

    Args:
        title: heading on the page.
        file: script that has both versions.
        bound: held-out NLL in nats that SLANG's version stays below; chance is log 3 = 1.10 for the clouds and
            log 2 = 0.69 for the sentences.
        changed: lines that are other lines in SLANG's version, or new; indentation does not count.
        needs: packages besides torch.
        note: what else there is to say.
    """

    title: str
    file: str
    bound: float
    changed: int
    needs: tuple[str, ...] = ()
    note: str = ""

    @property
    def source(self) -> str:
        return (HERE / self.file).read_text(encoding="utf-8")

    def versions(self) -> tuple[list[str], list[str]]:
        """The lines of Adam's version and of SLANG's, under the same names."""
        pieces = re.split(r"\n\n\n(?=def |class |if )", self.source)
        found = []
        for words in (("def adam()", "class Adam("), ("def slang()", "class SLANG(")):
            kept = "\n\n\n".join(piece for word in reversed(words) for piece in pieces if piece.startswith(word))
            found.append(
                kept.rstrip("\n").replace("class SLANG(", "class Module(").replace("class Adam(", "class Module(")
            )
        names = (
            ("Adam(network", "Module(network"),
            ("SLANG(network", "Module(network"),
            ("slang()", "train()"),
            ("adam()", "train()"),
        )
        for old, new in names:
            found = [text.replace(old, new) for text in found]
        return found[0].splitlines(), found[1].splitlines()

    def diff(self) -> list[str]:
        """Adam's version with the lines that change, as `diff` shows it, without headers."""
        before, after = self.versions()
        return [line for line in difflib.ndiff(before, after) if not line.startswith("?")]

    def changes(self) -> list[str]:
        """Lines of SLANG's version that Adam's does not have, without indentation."""
        before, after = ([line.strip() for line in lines] for lines in self.versions())
        return [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:]]


TRAINER = """\
`Trainer` calls `opt.train()` before every forward pass and `opt.eval()` before an evaluation, because the
optimizer has them: nothing in the loop changes. `optimizer_cls_and_kwargs=(slangvi.SLANG, {"model": model,
"num_data": ...})` does the same. Set `max_grad_norm=0` for float16. `Trainer` divides the losses of
micro-batches where `trainer.model_accepts_loss_kwargs` is false, and language models divide theirs by the tokens of all
of them; then pass `accumulation_steps`. Where an epoch may end with fewer micro-batches, give `Trainer` a
`compute_loss_func` that takes the mean over its batch instead: that is divided by nothing.
At temperature 1 the mean's own NLL was as high as that of the prediction: training suffered, not prediction alone.
What helped was `temperature=0.1`, with a `prior_precision` divided by it (30 / 0.1), so that the whole posterior is
cooled, and a narrower start, `init_precision`, tried together."""
LIGHTNING = """\
Lightning hands a closure to `step`, which draws by itself: without accumulation the first changed line is
enough, and `mc_samples` may be larger than 1. The closures of accumulating batches, and all closures under
`16-mixed`, run outside `step`, and `train()` and `eval()` draw for those. A `training_step` that returns None there
calls `eval()` before it does. `ModelCheckpoint` and `fit(ckpt_path=...)` work as they are; pass `generator=` to the
optimizer, since Lightning saves no random state."""
ACCELERATE = """\
The wrapper has `train` and `eval` but no `posterior`: it is at `opt.optimizer`. `accelerator.backward` divides
the loss, hence `accumulation_steps`."""
SCALER = "Do not call `scaler.unscale_(opt)`. A step that the scaler skips leaves state and weights as they were."
COMPILED = """\
Compiled code calls no hook it did not know of when it was compiled, and the hooks tell examples apart. So
between `train()` and `step()` the model runs as written, without the compiler's gain; everywhere else it is
compiled."""
CYCLE = "The rate of the precision follows `lr`; both must stay below 1. OneCycle moves `momentum` too."
LAST = """\
Call SLANG's `step` (or `eval()`) before that of the other optimizer: gradients are told apart by calling
modules again, with the weights they were called with. Cooled, the layer predicted as well as with Adam; at
temperature 1 and a rate of 0.05 a little worse, 0.221 against 0.213 over eight data sets."""
LORA = """\
Frozen weights stay out by themselves, so the posterior has the adapters' parameters alone, and a checkpoint of
it is as small as they are. Cooled as above, and slower: one epoch at a rate of 0.05 that never falls left the mean
itself far off, not only the draws around it."""

SUBSET = "Cooled as the last layer is; at temperature 1 the NLL was 0.245 over eight data sets, against 0.225."

LOOPS = {
    loop.file.removesuffix(".py"): loop
    for loop in (
        Loop("Plain PyTorch", "plain.py", 0.6, 3),
        Loop("Lightning", "lightning_loop.py", 0.63, 5, ("lightning",), LIGHTNING),
        Loop("Hugging Face Trainer", "trainer_loop.py", 0.34, 3, ("transformers", "accelerate"), TRAINER),
        Loop("Accelerate", "accelerate_loop.py", 0.63, 3, ("accelerate",), ACCELERATE),
        Loop("LoRA adapters with PEFT", "lora_loop.py", 0.48, 4, ("transformers", "peft"), LORA),
        Loop("float16 and a GradScaler", "scaler_loop.py", 0.6, 3, note=SCALER),
        Loop("bfloat16", "bfloat16_loop.py", 0.6, 3),
        Loop("torch.compile", "compiled_loop.py", 0.6, 3, note=COMPILED),
        Loop("OneCycleLR", "one_cycle_loop.py", 0.62, 4, note=CYCLE),
        Loop("ReduceLROnPlateau", "plateau_loop.py", 0.6, 3),
        Loop("The last layer only", "last_layer_loop.py", 0.59, 4, note=LAST),
        Loop("Some parameters only", "subset_loop.py", 0.6, 3, note=SUBSET),
    )
}
