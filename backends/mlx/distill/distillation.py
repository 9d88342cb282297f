"""One distillation from beginning to end, in a folder of its own: collect texts, choose the draft vocabulary, train,
and hold the network against texts that it never saw.

Every stage leaves files, so that a run that was stopped goes on where it was, and comes to the same drafter. The folder
remembers what it was begun with; something else is refused.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt

from backends.mlx.backend import MLXBackend
from backends.mlx.distill.acceptance import acceptance
from backends.mlx.distill.asking import Opening, ask
from backends.mlx.distill.collect import Prompt, Text, collect
from backends.mlx.distill.corpus import frequent, read_shard, write_shard
from backends.mlx.distill.train import Frozen, Schedule, Trained, Trainer
from backends.mlx.drafts.eagle import Eagle, EagleShape, parameters_of
from backends.mlx.drafts.files import DrafterHeader, save_drafter
from backends.mlx.drafts.target import Borrowed


class DistillPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that a drafter depends on, besides its target and the prompts."""

    shape: EagleShape
    seed: int = 0
    prompts: int = 4096
    self_asked: int = 0
    """So many of them the target makes up."""
    question: int = 192
    """Tokens of such a one at most."""
    shard: int = 512
    """Prompts whose texts lie in one file."""
    answer: int = 112
    """Tokens of an answer at most."""
    lanes: int = 96
    """Prompts that are answered at once."""
    drafted: int = 8192
    """Tokens that can be drafted: the most frequent ones of the answers."""
    start: str = ""
    """The checksum of a drafter that training goes on from; empty for none."""
    held_out: int = 160
    """Texts that are not trained on; drawn greedily."""
    schedule: Schedule = Schedule()


class OtherRunError(ValueError):
    """A folder holds another run's files."""


class Made(msgspec.Struct, frozen=True):
    """What came of a run: the network, the tokens that it drafts, and how good it is."""

    network: Eagle
    ids: npt.NDArray[np.uint32]
    held: Sequence[Text]
    """The texts that it was not trained on."""
    positions: int
    """Tokens of answers that were trained on."""
    covered: float
    """Which share of the held-out answers' tokens can be drafted."""
    acceptance: tuple[float, ...]
    """By position, on the texts that were held out."""

    def save(self, file: Path, header: DrafterHeader) -> None:
        """Write the drafter in half precision."""
        file.parent.mkdir(parents=True, exist_ok=True)
        parameters = parameters_of(self.network).items()
        arrays = {name: np.array(value.astype(mx.float16)) for name, value in parameters}
        save_drafter(file, header, {**arrays, "ids": self.ids})


class Distillation:
    """Owns a folder. Its stages are called in order; each returns at once if it was done before."""

    def __init__(self, folder: Path, plan: DistillPlan, target: str) -> None:
        """`target` names the target and the prompts. Raises OtherRunError."""
        self._folder = folder
        self._plan = plan
        folder.mkdir(parents=True, exist_ok=True)
        told = msgspec.json.format(msgspec.json.encode({"plan": plan, "target": target}))
        file = folder / "plan.json"
        if file.exists() and file.read_bytes() != told:
            raise OtherRunError(f"{folder} holds a run with another plan, or for another model: name another folder")
        file.write_bytes(told)

    @property
    def shards(self) -> int:
        """How many files of texts there are in the end."""
        return -(-self._plan.prompts // self._plan.shard)

    def questions(
        self, backend: MLXBackend, opening: Opening, told: Callable[[tuple[int, ...]], None]
    ) -> list[tuple[int, ...]]:
        """What the backend, whose taps are the plan's, makes up; `told` of each question. Raises NoQuestionsError."""
        file = self._folder / "questions.json"
        if not file.exists():
            plan = self._plan
            made = ask(
                backend,
                opening,
                wanted=plan.self_asked,
                seed=plan.seed,
                lanes=plan.lanes,
                longest=plan.question,
                told=told,
            )
            unfinished = file.with_suffix(".unfinished")
            unfinished.write_bytes(msgspec.json.encode(made))
            unfinished.replace(file)
        return msgspec.json.decode(file.read_bytes(), type=list[tuple[int, ...]])

    def collect(self, backend: MLXBackend, prompts: Sequence[Prompt], told: Callable[[int, Text], None]) -> None:
        """Have the backend, whose taps are the plan's, answer all prompts; `told` of each text and its shard."""
        for shard in range(self.shards):
            if self._shard(shard).exists():
                continue
            asked = prompts[shard * self._plan.shard : (shard + 1) * self._plan.shard]
            texts = []
            for text in collect(backend, asked, lanes=self._plan.lanes, answer=self._plan.answer):
                texts.append(text)
                told(shard, text)
            write_shard(self._shard(shard), texts)

    def train(
        self, target: Borrowed, told: Callable[[Trained], None], *, start: Eagle | None = None, every: int = 100
    ) -> Made:
        """Train on the texts, with a checkpoint `every` so many updates, and see what came of it. `start` is what the
        plan names, in float32.
        """
        texts = [text for shard in range(self.shards) for text in read_shard(self._shard(shard))]
        held, texts = self._held_out(texts)
        ids = frequent(texts, self._plan.drafted, target.vocabulary)
        everything = mx.arange(target.vocabulary)
        frozen = Frozen(target.embedding(everything).astype(mx.float32), target.head_rows(ids).astype(mx.float32))
        scale = float(np.mean(np.concatenate([text.scales for text in texts])))
        network = first_network(self._plan.shape, self._plan.seed, scale)
        if start is not None:
            network.load_weights(list(parameters_of(start).items()))
        trainer = Trainer(network, frozen, texts, self._plan.schedule, self._plan.seed)
        checkpoint = self._folder / "checkpoint.safetensors"
        if checkpoint.exists():
            trainer.restore(checkpoint)
        for trained in trainer.updates():
            told(trained)
            if trained.done % every == 0 or trained.done == trained.total:
                trainer.save(checkpoint)
        answers = [text.tokens[text.prompt :] for text in held]
        return Made(
            network,
            ids,
            held,
            positions=sum(len(text.tokens) - text.prompt for text in texts),
            covered=float(np.isin(np.concatenate(answers), ids).mean()) if answers else 0.0,
            acceptance=acceptance(network, frozen, ids, held, self._plan.schedule.steps),
        )

    def _shard(self, shard: int) -> Path:
        return self._folder / f"texts-{shard:05}.safetensors"

    def _held_out(self, texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
        """Some of the texts that were drawn greedily, chosen by the seed; and the rest of all."""
        greedy = [index for index, text in enumerate(texts) if text.greedy]
        chance = np.random.default_rng(self._plan.seed)
        count = min(self._plan.held_out, len(greedy) // 4)
        held = set(chance.choice(greedy, size=count, replace=False).tolist()) if count else set()
        return [texts[index] for index in sorted(held)], [text for i, text in enumerate(texts) if i not in held]


def first_network(shape: EagleShape, seed: int, scale: float) -> Eagle:
    """With weights of chance, but the head's features pass through it almost unchanged at first: it begins by saying
    what the target said last. `scale` is the root mean square of what the target's head reads.
    """
    mx.random.seed(seed)
    network = Eagle(shape)
    rest = 0.01 * mx.random.normal((shape.dims, (len(shape.taps) - 1) * shape.dims))
    network.fuse.weight = mx.concatenate([rest, mx.eye(shape.dims)], axis=1)
    network.attention.o_proj.weight = 0.1 * network.attention.o_proj.weight
    network.down_proj.weight = 0.1 * network.down_proj.weight
    network.norm.weight = scale * network.norm.weight
    mx.eval(parameters_of(network))
    return network
