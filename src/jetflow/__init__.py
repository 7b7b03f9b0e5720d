"""jetflow: lossless tree speculative decoding from plain parts.

Everything named here can be imported from `jetflow`; it is loaded when first used, so that `import jetflow` is quick
and loads neither transformers nor triton.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "jetflow.acceptors": (
        "BlockVerification",
        "GreedyAcceptor",
        "RecursiveRejection",
        "SamplingAcceptor",
        "TraversalVerification",
        "TypicalAcceptance",
    ),
    "jetflow.budgets": ("ThroughputBudget",),
    "jetflow.decoding": ("SpeculativeDecoder",),
    "jetflow.drafters.draft_model": ("DraftModelDrafter",),
    "jetflow.drafters.eagle": ("EagleDrafter",),
    "jetflow.drafters.head": ("head_drafter",),
    "jetflow.drafters.merged": ("MergedDrafter",),
    "jetflow.drafters.parallel": ("ParallelDrafter",),
    "jetflow.drafters.prompt_lookup": ("PromptLookupDrafter",),
    "jetflow.drafters.reuse": ("ReusingDrafter",),
    "jetflow.graphs": ("GraphSettings",),
    "jetflow.heads.block_draft_head": ("BlockDraftHead",),
    "jetflow.heads.checkpoint": ("load_head", "save_head"),
    "jetflow.heads.config": ("DraftHeadConfig",),
    "jetflow.heads.eagle_config": ("EagleHeadConfig",),
    "jetflow.heads.eagle_head": ("EagleHead",),
    "jetflow.heads.window": ("WindowedLayers",),
    "jetflow.losses": (
        "CrossEntropy",
        "ForwardKL",
        "JensenShannon",
        "LogAcceptance",
        "MixedLoss",
        "ReverseKL",
        "TotalVariation",
        "TreeAcceptance",
    ),
    "jetflow.protocols": ("Acceptance", "Candidates", "DraftContext", "Frontier", "TargetOutput"),
    "jetflow.results": ("GenerationResult", "Round", "RoundStats"),
    "jetflow.targets": ("Target",),
    "jetflow.scoring.acceptance_table": ("AcceptanceTable",),
    "jetflow.trees.expanders": ("Beam", "BestFirst", "Chain", "FanoutBestFirst", "FixedShape"),
    "jetflow.trees.sampling": ("ChildSampling",),
    "jetflow.trees.sources": ("MarginalSource", "PairwiseSource", "RecurrentSource"),
    "jetflow.trees.token_tree": ("TokenTree",),
    "jetflow.verifiers": ("TreeVerifier",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted([*_HOME_OF, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'jetflow' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
