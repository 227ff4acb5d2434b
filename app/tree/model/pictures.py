"""Pictures of a tree on their way into a model: the features of each once, and their gradients back, once.

Promises: nothing is known of a family by its name. A model takes features through transformers' public argument
`mm_encoder_outputs`, in the form in which its own `get_image_features` gives them; what else it makes of a picture
(deepstack features) goes the same way. A picture goes through the tower once a pass, with others of its size, when its
first row is needed, and where the tower is frozen once for as long as its weights stay. Gradients of rows are added up
in the accumulation dtype over all chunks and sequences; one backward through the tower, which is linear in them, ends
the pass. Where the graphs of all pictures are too large to wait for it, the tower runs once more then, picture by
picture. Ranks of a group share all of that out by pictures (`app.tree.model.picture_shares`). The module's own notes
(`rope_deltas`) are as found.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from app.tree.attention.groups import RankGroup, RowShares
from app.tree.model.language import language_model
from app.tree.model.picture_shares import Route, picture_of
from app.tree.model.positions import PicturePositions, counts_pictures
from app.tree.model.sight import KIND_ARGUMENTS, Sight, sight_of
from app.tree.planning.uncut import Ahead, Uncut
from app.tree.prefix_tree import Bools, Ints, Picture, PrefixTree
from app.tree.transfer import on_device

_KEPT_BYTES = 2**30
"""Features of frozen towers that are kept from pass to pass."""
ROWS_AT_ONCE = 1024
"""Most rows of features that pictures which share a run of the tower have: they are small, where a run's overhead is
larger than they are, and its scratch memory no more than one large picture's."""


class _Form(NamedTuple):
    """How a model gives features: the type of the output, and of what holds them; widths of the tables, and dtype."""

    output: type[Any]
    listed: bool
    widths: list[int]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class TakenRows:
    """Rows of features that a chunk was given, as leaves.

    Attributes:
        leaves: one a table, [m, H].
        route: the way that the gradients of these m rows go back, as gradients of n rows that were given here.
        pictures: those that the n rows are of; `index`: int64 [n], the row in these pictures' tables one after the
            other.
    """

    leaves: list[Tensor]
    route: Route
    pictures: list[int]
    index: Tensor


class Tower:
    """What makes features of pictures: a model's `get_image_features` behind transformers' image processor.

    Attributes:
        placeholder: the id that stands for a row of features in the model's vocabulary.
        runs: pictures that have gone through the tower.
    """

    def __init__(self, model: PreTrainedModel, processor: Any | None) -> None:
        self.model, self.processor = model, processor
        self.body: Any = model.base_model
        self.placeholder: int = getattr(model.config, "image_token_id", -1)
        self.positions = PicturePositions(model) if counts_pictures(model) else None
        self.runs = 0
        self._parameters = tower_parameters(model)
        self._kept: OrderedDict[bytes, list[Tensor]] = OrderedDict()
        self._kept_of: Any = None
        self.form: _Form | None = None

    @cached_property
    def sight(self) -> Sight:
        """What placeholders see. Raises ValueError where that is refused."""
        return sight_of(self.model)

    def sees_ahead(self, tree: PrefixTree) -> bool:
        """Whether placeholders of the tree's pictures see each other."""
        return bool(tree.pictures and self.sight.layers)

    def uncut(self, tree: PrefixTree) -> Uncut | None:
        """Runs of placeholders that see each other; None where nothing does, as in text."""
        return Uncut.of(tree) if self.sees_ahead(tree) else None

    def least_chunk(self, tree: PrefixTree) -> int:
        """Tokens that a chunk has to have room for."""
        uncut = self.uncut(tree)
        return 1 if uncut is None else max(1, uncut.longest)

    @property
    def trained(self) -> bool:
        return any(p.requires_grad for p in self._parameters)

    def inputs(self, pictures: Sequence[Picture], accepted: Any) -> dict[str, Tensor]:
        """The arguments for these pictures, of one sequence, that a function with such parameters takes."""
        found = self.processor([picture.pixels for picture in pictures], return_tensors="pt")  # type: ignore[misc]
        parameter = self._parameters[0]
        return {
            name: value.to(parameter.device, parameter.dtype if value.is_floating_point() else value.dtype)
            for name, value in found.items()
            if name in accepted and isinstance(value, Tensor)
        }

    def untouched(self, pictures: Sequence[Picture], is_row: Bools) -> dict[str, Tensor]:
        """What the model itself takes for one sequence: its pictures in order, as pixels, and which tokens are their
        placeholders."""
        if not len(pictures):
            return {}
        accepted = inspect.signature(self.body.forward).parameters
        kinds = on_device(is_row.astype(np.int64), self._parameters[0].device).unsqueeze(0)
        named = {name: kinds for name in KIND_ARGUMENTS if name in accepted}
        if not named and self.positions is not None:
            named = {"attention_mask": torch.ones_like(kinds)}  # without it they count no pictures
        return self.inputs(pictures, accepted) | named

    def features(self, pictures: Sequence[Picture]) -> list[list[Tensor]]:
        """Of each picture its tables, [tokens, H] each: features, and those of deepstack; with graph where gradients
        are enabled and the tower is trained."""
        if self.trained:
            return self._run(pictures)
        weights = [(p.data_ptr(), p._version) for p in self._parameters]
        if weights != self._kept_of:
            self._kept.clear()
            self._kept_of = weights
        missing = list({picture.key: picture for picture in pictures if picture.key not in self._kept}.values())
        if missing:
            with torch.no_grad():
                for picture, tables in zip(missing, self._run(missing)):
                    self._kept[picture.key] = [table.clone() for table in tables]  # alone, to be let go alone
        found = [self._kept[picture.key] for picture in pictures]
        for picture in pictures:
            self._kept.move_to_end(picture.key)
        kept = sum(x.nbytes for tables in self._kept.values() for x in tables) if missing else 0
        while kept > _KEPT_BYTES and len(self._kept) > 1:
            kept -= sum(x.nbytes for x in self._kept.popitem(last=False)[1])
        return found

    def _run(self, pictures: Sequence[Picture]) -> list[list[Tensor]]:
        """Through the tower: pictures of equal size, which processors lay out alike, together."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for k, picture in enumerate(pictures):
            alike.setdefault((*picture.pixels.shape, picture.tokens), []).append(k)
        tables: dict[int, list[Tensor]] = {}
        for (*_, tokens), members in alike.items():
            count = max(1, ROWS_AT_ONCE // tokens)
            for first in range(0, len(members), count):
                together = members[first : first + count]
                tables |= zip(together, self._run_together([pictures[k] for k in together]))
        return [tables[k] for k in range(len(pictures))]

    def _run_together(self, pictures: Sequence[Picture]) -> list[list[Tensor]]:
        self.runs += len(pictures)
        inputs = self.inputs(pictures, inspect.signature(self.body.get_image_features).parameters)
        out = self.body.get_image_features(**inputs, return_dict=True)
        pooled = getattr(out, "pooler_output", None)
        if pooled is None:
            raise ValueError(
                f"pictures: get_image_features of {type(self.model).__name__} gives no rows that stand in a sequence"
                " (pooler_output); use another model, or text alone"
            )
        tables = [_rows(pooled), *(_rows(x) for x in getattr(out, "deepstack_features", None) or ())]
        widths = [table.shape[1] for table in tables]
        self.form = _Form(type(out), isinstance(pooled, list | tuple), widths, tables[0].dtype)
        tokens = pictures[0].tokens
        for table in tables:
            if len(table) != tokens * len(pictures):
                raise ValueError(
                    f"picture {pictures[0].key.hex()} has {tokens} tokens, and {type(self.model).__name__} makes"
                    f" {len(table) // len(pictures)} rows of features of it; give Picture.tokens that number, of pixels"
                    " that need no resizing"
                )
        return [list(of_picture) for of_picture in zip(*(table.split(tokens) for table in tables))]

    def wrapped(self, tables: Sequence[Tensor]) -> dict[str, Any]:
        """Rows of features as the model's argument."""
        assert self.form is not None, "rows come from a run"
        held = [[x] if self.form.listed else x.unsqueeze(0) for x in tables]
        more = {"deepstack_features": held[1:]} if len(held) > 1 else {}
        needed = {field.name: None for field in fields(self.form.output) if field.default is MISSING}
        return {"mm_encoder_outputs": {"image": self.form.output(**(needed | {"pooler_output": held[0]} | more))}}

    @contextmanager
    def borrowed(self, with_grads: bool) -> Iterator[None]:
        """Inside, what enters the layers takes gradients where features do: keys and values of pictures on the path
        have theirs from layers below the first trained parameter too. What a forward notes on the model is undone."""
        noted = getattr(self.body, "rope_deltas", None)
        hook = None
        if with_grads and self.trained:
            hook = self.model.get_input_embeddings().register_forward_hook(
                lambda module, args, output: output.requires_grad_() if torch.is_grad_enabled() else output
            )
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()
            if hasattr(self.body, "rope_deltas"):
                self.body.rope_deltas = noted


class PicturePass:
    """The pictures of one pass over `tree`.

    Args:
        graphs: whether those through a trained tower are kept during the pass; otherwise each picture goes through it
            once more at the end, one at a time.
        owned: the pictures of each rank of `group`, or of the only one.
        group: the ranks that run the pass together.
    """

    def __init__(
        self,
        tower: Tower,
        tree: PrefixTree,
        graphs: bool,
        owned: Sequence[Sequence[int]],
        group: RankGroup | None = None,
    ) -> None:
        self.tower, self.tree, self.graphs, self.group = tower, tree, graphs, group
        self._uncut = tower.uncut(tree)
        self._owner = np.zeros(len(tree.pictures), np.int64)
        for rank, pictures in enumerate(owned):
            self._owner[list(pictures)] = rank
        parameter = tower._parameters[0]
        device, self._dtype = parameter.device, torch.promote_types(torch.float32, parameter.dtype)
        self.positions: Tensor | None = None  # [3, T]
        if tower.positions is not None:
            self.positions = on_device(tower.positions.of_tree(tree), device)
        self._tables: dict[int, list[Tensor]] = {}
        self._owed: dict[int, Tensor] = {}  # all tables side by side, in the accumulation dtype

    def model_tokens(self, tree: PrefixTree) -> Ints:
        """int64: the token ids of `tree` in the model's vocabulary."""
        return np.where(tree.picture_rows >= 0, self.tower.placeholder, tree.tokens)

    def position_ids(self, tokens: Ints, depths: Tensor) -> Tensor:
        """Of a run over these tree tokens: [3, 1, n], or `depths` [1, n] where the model counts tokens."""
        if self.positions is None:
            return depths
        return self.positions[:, on_device(tokens, depths.device)].unsqueeze(1)

    def ahead(self, tokens: Ints) -> Ahead | None:
        """What rows of a run over these tree tokens see of those after them."""
        return None if self._uncut is None else Ahead(self.tower.sight.layers, self._uncut.parts(tokens))

    def untouched(self, tokens: Ints) -> dict[str, Any]:
        """What the model itself takes for one whole sequence of tree tokens."""
        rows, starts = self.tree.picture_rows[tokens], self.tree.picture_starts
        firsts = rows[np.isin(rows, starts[:-1])]
        return self.tower.untouched([self.tree.pictures[i] for i in np.searchsorted(starts, firsts)], rows >= 0)

    def take(self, tokens: Ints, shares: RowShares | None = None) -> tuple[dict[str, Any], TakenRows | None]:
        """The model's argument for a run over these tree tokens, of which this rank has its share, and the rows in it
        where they take gradients. Collective where ranks share a run that shows a picture."""
        rows = self.tree.picture_rows[tokens]
        parts = [rows] if shares is None else [rows[shares.run_by(rank)] for rank in range(shares.group.size)]
        wanted = [part[part >= 0] for part in parts]
        if not any(map(len, wanted)):
            return {}, None
        route = Route.of(self.group, wanted, [self._owner[picture_of(self.tree, part)] for part in wanted])
        tables, pictures, index = self._given(route.given)
        leaves = [table[index] for table in tables]
        if self.group is not None:
            leaves = self._sent(route, leaves)
        trained = self.tower.trained and torch.is_grad_enabled()
        for leaf in leaves if trained else ():
            leaf.requires_grad_()
        given = self.tower.wrapped(leaves) if len(leaves[0]) else {}
        return given, TakenRows(leaves, route, pictures, index) if trained else None

    def _given(self, rows: Ints) -> tuple[list[Tensor], list[int], Tensor]:
        """Tables that hold these rows of this rank's pictures, one after the other; of which pictures; and the rows'
        places in them, int64 [n]."""
        starts, owners = self.tree.picture_starts, picture_of(self.tree, rows)
        pictures = np.unique(owners)
        missing = [picture for picture in pictures.tolist() if picture not in self._tables]
        with torch.set_grad_enabled(self.graphs):  # whatever the first run that needs them keeps
            made = self.tower.features([self.tree.pictures[picture] for picture in missing])
        self._tables |= zip(missing, made)
        sizes = starts[pictures + 1] - starts[pictures]
        place = np.cumsum(sizes) - sizes - starts[pictures]  # from a row to its place in these pictures' tables
        local = rows + place[np.searchsorted(pictures, owners)]
        columns = zip(*(self._tables[picture] for picture in pictures.tolist()))
        tables = [torch.cat(column).detach() for column in columns]
        return tables, pictures.tolist(), on_device(local, self.tower._parameters[0].device)

    def _sent(self, route: Route, given: list[Tensor]) -> list[Tensor]:
        """Collective: the rows that this rank runs, in order, of each table. They travel in the accumulation dtype,
        which ranks agree on that have run no tower."""
        if self.tower.form is None:  # nor has this one, and it has to know what comes
            with torch.no_grad():
                self.tower.features([min(self.tree.pictures, key=lambda picture: picture.tokens)])
        form = self.tower.form
        assert form is not None, "a tower has run"
        parameter = self.tower._parameters[0]
        wide = torch.cat(given, 1) if given else parameter.new_zeros(0, sum(form.widths), requires_grad=False)
        own = route.there(wide.to(self._dtype)).split(form.widths, 1)
        return [part.to(form.dtype).contiguous() for part in own]

    def owe(self, taken: TakenRows | None) -> None:
        """Adds up what the backward of a run gave the rows that are of this rank's pictures. Collective where `take`
        was."""
        if taken is None:
            return
        dtype = self._dtype
        grads = [torch.zeros_like(x, dtype=dtype) if x.grad is None else x.grad.to(dtype) for x in taken.leaves]
        for leaf in taken.leaves:
            leaf.grad = None
        given = taken.route.back(torch.cat(grads, 1))
        sizes = [self.tree.pictures[picture].tokens for picture in taken.pictures]
        sums = given.new_zeros(sum(sizes), given.shape[1]).index_add_(0, taken.index, given)
        for picture, grad in zip(taken.pictures, sums.split(sizes)):
            known = self._owed.get(picture)
            self._owed[picture] = grad.clone() if known is None else known.add_(grad)

    @property
    def foreseen(self) -> bool:
        """Whether the graph of `finish` is there before it: not where pictures go through the tower once more."""
        return self.graphs or not self.tower.trained

    def roots(self) -> list[Tensor]:
        """Of the backward in `finish`, those of pictures that were owed nothing in the end included."""
        return [table for tables in self._tables.values() for table in tables if table.requires_grad]

    def finish(self) -> None:
        """One backward through the tower, of what all rows are owed."""
        if self.graphs:
            _backward([(self._tables[picture], owed) for picture, owed in self._owed.items()])
        self._tables.clear()
        for picture in [] if self.graphs else list(self._owed):
            _backward([(self.tower.features([self.tree.pictures[picture]])[0], self._owed.pop(picture))])
        self._owed.clear()


def _backward(owed: Sequence[tuple[list[Tensor], Tensor]]) -> None:
    """Of tables of features with their gradients, side by side, those that were trained for."""
    split = [(tables, grads.split([x.shape[1] for x in tables], 1)) for tables, grads in owed]
    pairs = [pair for tables, grads in split for pair in zip(tables, grads, strict=True) if pair[0].requires_grad]
    if pairs:
        torch.autograd.backward([table for table, _ in pairs], [grad.to(table.dtype) for table, grad in pairs])


def tower_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Of all that makes features of pictures, projectors included; none in a model of text."""
    text = {id(parameter) for parameter in language_model(model).parameters()}
    return [parameter for parameter in model.base_model.parameters() if id(parameter) not in text]


def picture_tokens(config: Any, processor: Any, pixels: Any) -> int:
    """How many placeholders a picture takes in a model of this transformers configuration.

    Args:
        processor: the model's image processor, or what `picture_processor` gives.
        pixels: uint8 [H, W, 3].
    """
    if hasattr(processor, "layout"):
        return int(processor.layout(*pixels.shape[:2]).count(config.image_token_id))
    found, vision = processor([pixels], return_tensors="pt"), config.vision_config
    grid = found.get("image_grid_thw")
    if grid is not None:
        return int(grid.prod()) // processor.merge_size**2
    per_tile = getattr(config, "mm_tokens_per_image", None)
    if per_tile is not None:
        return int(found["pixel_values"].shape[:-3].numel() * per_tile)
    places = found.get("image_position_ids")  # of patches, below 0 where there is none
    if places is not None:
        return int((places >= 0).all(-1).sum()) // vision.pooling_kernel_size**2
    values = found["pixel_values"]
    height, width = found["image_sizes"][0] if "image_sizes" in found else values.shape[-2:]
    tiles, patch = values.shape[:-3].numel(), vision.patch_size
    patch_height, patch_width = patch if isinstance(patch, list | tuple) else (patch, patch)
    rows = (int(height) // patch_height) * (int(width) // patch_width)
    rows //= getattr(config, "spatial_merge_size", 1) ** 2 * getattr(config, "scale_factor", 1) ** 2
    rows = int(rows * getattr(config, "downsample_ratio", 1.0) ** 2)
    whole = getattr(config, "vision_feature_select_strategy", "default") == "full"
    return tiles * (rows + whole)  # with the token of the class


def picture_positions(model: PreTrainedModel, images: Any, pictures: Sequence[Picture]) -> Ints | None:
    """Positions int64 [3, L] of one sequence in a model that counts time, height and width of pictures; None in one
    that counts tokens. A token after the sequence is at one more than the last, in all three.

    Args:
        images: integers [L]: -1 for text, else the picture's index in `pictures`.
    """
    if not counts_pictures(model):
        return None
    tree = PrefixTree.build([np.zeros(len(images), np.int64)], images=[images], pictures=pictures)
    return PicturePositions(model).of_tree(tree)


def _rows(features: Any) -> Tensor:
    """[rows, H] of features in whatever holds them."""
    parts = [features] if isinstance(features, Tensor) else list(features)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
