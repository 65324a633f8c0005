"""The engines that use AOTInductor: native code for one target."""
