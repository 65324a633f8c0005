"""The real ParticleNet, trained on JetClass, from weaver-core."""
