// A program that runs an artifact on a bundle's reference without Python: under an emulator, or on a device.
//
//   prove FOLDER DEVICE CONTRACT REFERENCE CASE ANSWERS
//
// FOLDER: the artifact. CONTRACT: a JSON file with a manifest's signature and tolerances. REFERENCE: its safetensors file.
// The bytes of the output rows of case number CASE are written to ANSWERS, column by column, in the order in which
// runtime/opening/same_bits.py digests them. On success the program prints `output NAME ELEMENTS OUTSIDE LARGEST RELATIVE` for
// each output and returns 0. Else it prints the error, with its code at the end, and returns 1.
#include <cstdio>
#include <fstream>
#include <iterator>

#include "common/artifact.h"
#include "checks.h"
#include "common/device_driver.h"

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

std::string target_of(const std::string &folder) {
  const std::string text = read((folder + "/target.txt").c_str());
  return text.substr(text.find('\n') + 1);
}

// Collections on a device: a copy of each piece of memory, and a separate stream.
class OnDevice {
 public:
  OnDevice(const std::string &vendor, const std::string &device) : device_(soa_runner::Driver::of(vendor), device) {
    const soa_runner::Device::Current current(device_);
    call(soa_runner::kNewStream, &stream_, 1u);
  }
  ~OnDevice() {
    const soa_runner::Device::Current current(device_);
    for (const std::uintptr_t address : held_) device_.driver.attempt(soa_runner::kFree, address);
    device_.driver.attempt(soa_runner::kEndStream, stream_);
  }

  std::vector<soa::Memory> bound(const soa_library::Collections &memory) {
    const soa_runner::Device::Current current(device_);
    for (const std::uintptr_t address : held_) call(soa_runner::kFree, address);
    held_.clear();
    std::vector<soa::Memory> found;
    for (const auto &[name, collection] : memory) {
      const std::size_t first = held_.size();
      for (const auto &[address, size] : collection.pieces()) {
        std::uintptr_t there = 0;
        call(soa_runner::kAllocate, &there, size);
        held_.push_back(there);
        call(soa_runner::kCopyIn, there, static_cast<const void *>(address.get()), size, stream_);
      }
      found.push_back(tied(name, collection, first));
    }
    return found;
  }

  void back(const soa_library::Collections &memory) {
    const soa_runner::Device::Current current(device_);
    std::size_t next = 0;
    for (const auto &[name, collection] : memory) {
      for (const auto &[address, size] : collection.pieces()) {
        call(soa_runner::kCopyOut, static_cast<void *>(address.get()), held_[next++], size, stream_);
      }
    }
    call(soa_runner::kSynchronise, stream_);
  }

  void *stream() const { return stream_; }

 private:
  template <typename... Given>
  void call(soa_runner::DriverFunction which, Given... given) {
    device_.driver.call(which, "moving the reference", given...);
  }

  soa::Memory tied(const std::string &name, const soa::Collection &collection, std::size_t next) const {
    const auto address = [&] { return reinterpret_cast<void *>(held_[next++]); };
    if (collection.layout().storage == "buffer") return {name, address(), collection.size()};
    soa::Columns columns;
    for (const soa::Column &column : collection.layout().columns) {
      for (std::size_t k = 0; k < column.components; ++k) columns[column.name].push_back(address());
    }
    return {name, columns, collection.size()};
  }

  soa_runner::Device device_;
  void *stream_ = nullptr;
  std::vector<std::uintptr_t> held_;
};

void prove(char **given) {
  const soa_library::Json contract = soa_library::Json::parse(read(given[3]));
  const soa::Model model = soa::Model::open(given[1], given[2]);
  std::ofstream answers(given[6], std::ios::binary);
  const std::size_t wanted = std::stoul(given[5]);
  soa_library::Place place;
  std::unique_ptr<OnDevice> device;
  if (std::string(given[2]) != "cpu") {
    device = std::make_unique<OnDevice>(target_of(given[1]).substr(0, 4), given[2]);
    place.bound = [&](const soa_library::Collections &memory) { return device->bound(memory); };
    place.stream = device->stream();
  }
  place.answered = [&](std::size_t number, const soa_library::Collections &memory) {
    if (device != nullptr) device->back(memory);
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
  } catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 1;
}
