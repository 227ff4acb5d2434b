"""Dynamic Tree Attention as a library: train on sequences that share prefixes, computing each prefix once.

Needs torch and transformers only; knows no RL and no Lightning. See `PrefixTree`, `TreeEngine`, `partition`, and
`inspect_tree`, `inspect_model` for what a tree would save, without running it. Others import nothing below this face.
"""

from app.tree.attention.chosen.compressed import choose_entries, entry_places
from app.tree.attention.chosen.group_indexer import Groups, IndexKeys, chooses_groups, run_group_indexer
from app.tree.attention.chosen.indexers import (
    Indexers,
    chooses_blocks,
    chosen_in,
    index_parameters,
    pools,
    run_block_indexer,
    run_indexer,
)
from app.tree.attention.chosen.selected import among
from app.tree.attention.function import section_of
from app.tree.attention.groups import RankGroup
from app.tree.attention.kernels import triton_lacks
from app.tree.attention.places import Places, leave_unscaled
from app.tree.calibrate import device_rates
from app.tree.engine import TreeEngine
from app.tree.experts.replay import routed
from app.tree.experts.routers import Routers
from app.tree.heads import Likeliest, SoftTargets
from app.tree.heads.outputs import FlatOutputs, SequenceOutputs, TreeOutputs
from app.tree.memory import free_bytes
from app.tree.model.language import (
    auto_class,
    body_of,
    kept_in_float32,
    language_model,
    moves_base,
    own_config,
    parted_ties,
    tied_names,
)
from app.tree.model.pictures import Tower, picture_positions, picture_tokens, tower_parameters
from app.tree.model.processors import PictureProcessor, picture_processor
from app.tree.model.quantised import (
    QUANTIZATIONS,
    SavedWeight,
    cast_quantised,
    elements,
    plain_names,
    quantised_bytes,
    quantised_layers,
    quantised_loading,
    scaled_by,
    scales,
    settle_quantised,
    whole_weights,
)
from app.tree.model.refusals import most_tokens, refuse_lengths, refuse_pictures, refuse_tokens
from app.tree.model.shallow import first_layers
from app.tree.model.vocabulary import CutVocabulary, vocabulary_modules
from app.tree.partition import partition
from app.tree.prefix_tree import Picture, PrefixTree
from app.tree.report import ModelReport, TreeReport, inspect_model, inspect_tree, read_config
from app.tree.self_check import SelfCheckError
from app.tree.states.compressors import Compressor, CompressorCall, made_by
from app.tree.states.functions import STATES_ARGUMENT
from app.tree.states.kernels import PACKAGES as SCAN_PACKAGES
from app.tree.states.layers import StateLayers
from app.tree.states.piece_states import PieceStates
from app.tree.states.piece_tree import PieceTree
from app.tree.transfer import on_device

__all__ = [
    "QUANTIZATIONS",
    "SCAN_PACKAGES",
    "STATES_ARGUMENT",
    "Compressor",
    "CompressorCall",
    "CutVocabulary",
    "FlatOutputs",
    "Groups",
    "IndexKeys",
    "Indexers",
    "Likeliest",
    "ModelReport",
    "Picture",
    "PictureProcessor",
    "PieceStates",
    "PieceTree",
    "Places",
    "PrefixTree",
    "RankGroup",
    "Routers",
    "SavedWeight",
    "SelfCheckError",
    "SequenceOutputs",
    "SoftTargets",
    "StateLayers",
    "Tower",
    "TreeEngine",
    "TreeOutputs",
    "TreeReport",
    "among",
    "auto_class",
    "body_of",
    "cast_quantised",
    "choose_entries",
    "chooses_blocks",
    "chooses_groups",
    "chosen_in",
    "device_rates",
    "elements",
    "entry_places",
    "first_layers",
    "free_bytes",
    "index_parameters",
    "inspect_model",
    "inspect_tree",
    "kept_in_float32",
    "language_model",
    "leave_unscaled",
    "made_by",
    "most_tokens",
    "moves_base",
    "on_device",
    "own_config",
    "parted_ties",
    "partition",
    "picture_positions",
    "picture_processor",
    "picture_tokens",
    "plain_names",
    "pools",
    "quantised_bytes",
    "quantised_layers",
    "quantised_loading",
    "read_config",
    "refuse_lengths",
    "refuse_pictures",
    "refuse_tokens",
    "routed",
    "run_block_indexer",
    "run_group_indexer",
    "run_indexer",
    "scaled_by",
    "scales",
    "section_of",
    "settle_quantised",
    "tied_names",
    "tower_parameters",
    "triton_lacks",
    "vocabulary_modules",
    "whole_weights",
]
