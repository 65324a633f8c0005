"""The engines of AOTInductor: native code for one target."""
