// Test mode: an artifact against the answers of the eager model that its bundle keeps.
#ifndef SOA_REFERENCE_H
#define SOA_REFERENCE_H

#include "json.h"
#include "soa_model.hpp"

namespace soa_library {

// Run `model` on every case of the reference (stored: safetensors), in memory that was filled with 0xff before. Fails
// with SOA_DEVIATES where more values of an output are outside its tolerance than the version allows, or where a
// byte has changed that is no output; with std::exception where the reference is not of this manifest.
void check_reference(const Json &manifest, const std::string &stored, const soa::Model &model);

}  // namespace soa_library

#endif
