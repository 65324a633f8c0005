// Runs an artifact on a bundle's reference where Python does not run: under an emulator, or on a device.
//
//   prove FOLDER DEVICE CONTRACT REFERENCE CASE ANSWERS
//
// FOLDER is the artifact's; CONTRACT a file of JSON with a manifest's signature and tolerances; REFERENCE its safetensors.
// The bytes that rows of outputs have in case number CASE go to ANSWERS, column by column, as runtime/opening/bits.py digests
// them. Says `output NAME ELEMENTS OUTSIDE LARGEST RELATIVE` for each output and ends with 0, or says why not and ends with 1.
#include <cstdio>
#include <fstream>
#include <iterator>

#include "artifact.h"
#include "checks.h"

namespace {

std::string read(const char *path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error(std::string(path) + ": cannot be read");
  return {std::istreambuf_iterator<char>(stream), {}};
}

void write_answers(const soa_library::Json &signature, const soa_library::Collections &memory, std::ofstream &to) {
  for (const soa_library::Json &output : signature["outputs"].list()) {
    const soa::Collection &found = memory.at(output["collection"].text());
    const auto n = static_cast<std::streamsize>(output["plan"]["kind"].text() == "scalars" ? 1 : found.size());
    for (const soa_library::Json &component : output["plan"]["components"].list()) {
      const soa::Column &column = found.layout()[component.at(0).text()];
      const auto k = static_cast<std::size_t>(component.at(1).integer());
      to.write(found.column<char>(column.name, k), n * static_cast<std::streamsize>(column.itemsize));
    }
  }
}

void prove(char **given) {
  const soa_library::Json contract = soa_library::Json::parse(read(given[3]));
  const soa::Model model = soa::Model::open(given[1], given[2]);
  std::ofstream answers(given[6], std::ios::binary);
  const std::size_t wanted = std::stoul(given[5]);
  soa_library::Place place;
  place.answered = [&](std::size_t number, const soa_library::Collections &memory) {
    if (number == wanted) write_answers(contract["signature"], memory, answers);
  };
  for (const auto &[name, worst] : soa_library::check_reference(contract, read(given[4]), model, place)) {
    std::printf("output %s %zu %zu %.17g %.17g\n", name.c_str(), worst.elements, worst.outside, worst.gap, worst.relative);
  }
}

}  // namespace

int main(int count, char **given) {
  try {
    if (count != 7) throw std::runtime_error("prove FOLDER DEVICE CONTRACT REFERENCE CASE ANSWERS");
    prove(given);
    return 0;
  } catch (const soa_runner::Failure &failure) {
    std::fprintf(stderr, "%s\n", failure.text.c_str());
  } catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 1;
}
