// score BUNDLE N [test] [any_version] [KEY=VALUE ...]: what was loaded, then the outputs as their bits.
#include <cinttypes>
#include <cstdio>
#include <iostream>

#include "jets.hpp"

namespace {

int refused(const char *kind, const soa::Error &error) {
  const std::string code = error.code();
  if (error.what() != error.message() + " [" + code + "]") return 2;
  std::cerr << kind << ' ' << code << ": " << error.message() << '\n';
  return 1;
}

}  // namespace

int main(int argc, char **argv) {
  soa::Loading loading;
  for (int i = 3; i < argc; ++i) {
    const std::string word = argv[i], key = word.substr(0, word.find('=')), value = word.substr(word.find('=') + 1);
    if (key == "test") loading.test = true;
    if (key == "any_version") loading.any_version = true;
    if (key == "target") loading.target = value;
    if (key == "engine") loading.engine = value;
    if (key == "keys") loading.trusted_keys = value;
    if (key == "threads") loading.threads = std::stoi(value);
  }
  try {
    const soa::Model model = jets::load(argv[1], loading);
    const soa::Origin &origin = model.origin();
    std::printf("%s %s %s %s %s\n", origin.name.c_str(), origin.ref.empty() ? "-" : origin.ref.c_str(),
                origin.digest.c_str(), origin.target.c_str(), origin.engine.c_str());
    const std::int64_t n = std::stoll(argv[2]);
    const soa::Collection memory = model.collection("jets", n), results = model.collection("tags", n);
    for (std::size_t j = 0; j < 6; ++j) {
      float *const column = memory.column<float>(memory.layout().columns[j].name);
      for (std::int64_t i = 0; i < n; ++i) {
        column[i] = static_cast<float>((7 * static_cast<std::size_t>(i) + 13 * j) % 101) / 101.0f + 1.0f;
      }
    }
    const void *const read_only = memory.data();
    const jets::jets inputs(read_only, n);
    const jets::tags answers(results.data(), n);
    model.bind({inputs.memory, answers.memory})();
    const char *names = "xyz";
    for (const float *column : {answers.x, answers.y, answers.z}) {
      for (std::int64_t i = 0; i < n; ++i) {
        std::uint32_t bits = 0;
        std::memcpy(&bits, column + i, sizeof bits);
        std::printf("%c %lld %08" PRIx32 "\n", *names, static_cast<long long>(i), bits);
      }
      ++names;
    }
    return 0;
  } catch (const soa::BundleError &error) {
    return refused("BundleError", error);
  } catch (const soa::PromotionError &error) {
    return refused("PromotionError", error);
  } catch (const soa::TrustError &error) {
    return refused("TrustError", error);
  } catch (const soa::HostError &error) {
    return refused("HostError", error);
  } catch (const soa::HeaderError &error) {
    return refused("HeaderError", error);
  } catch (const soa::DeviationError &error) {
    return refused("DeviationError", error);
  } catch (const soa::Error &error) {
    return refused("Error", error);
  }
}
