"""soa-pipeline: trained torch models that run fast and right on Structure-of-Arrays memory.

    import pipeline

    session = pipeline.load("jet-tagger@production")
    jets = pipeline.Collection.wrap(session.layout("jets"), memory, n)
    tags = session.collection("tags", n)
    session.run(jets, tags)

Names are resolved on first use, so that `pipeline --help` does not wait for torch.
"""

import lazy_loader

import soa_pipeline

soa_pipeline.check_origins()

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
