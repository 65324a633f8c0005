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

// The content of a file.
std::string read(const std::string &path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error(path + ": cannot be read");
  return {std::istreambuf_iterator<char>(stream), {}};
}

// Writes the bytes of the output rows, column by column.
void write_answers(const soa_library::Json &signature, const soa_library::Collections &memory, std::ofstream &answers) {
  for (const soa_library::Json &output : signature["outputs"].list()) {
    const soa::Collection &collection = memory.at(output["collection"].text());
    const auto n = static_cast<std::streamsize>(output["plan"]["kind"].text() == "scalars" ? 1 : collection.size());
    for (const soa_library::Json &component : output["plan"]["components"].list()) {
      const soa::Column &column = collection.layout()[component.at(0).text()];
      const auto k = static_cast<std::size_t>(component.at(1).integer());
      answers.write(collection.column<char>(column.name, k), n * static_cast<std::streamsize>(column.itemsize));
    }
  }
}

// The target of an artifact: the second line of its target.txt, such as "cuda/sm_90".
std::string target_of(const std::string &folder) {
  const std::string text = read(folder + "/target.txt");
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

  // Copies the collections to the device, and returns the memory there. It frees the memory of the last case.
  std::vector<soa::Memory> copied_in(const soa_library::Collections &memory) {
    const soa_runner::Device::Current current(device_);
    for (const std::uintptr_t address : held_) call(soa_runner::kFree, address);
    held_.clear();
    std::vector<soa::Memory> on_device;
    for (const auto &[name, collection] : memory) {
      const std::size_t first = held_.size();
      for (const auto &[address, size] : collection.pieces()) {
        std::uintptr_t allocated = 0;
        call(soa_runner::kAllocate, &allocated, size);
        held_.push_back(allocated);
        call(soa_runner::kCopyIn, allocated, static_cast<const void *>(address.get()), size, stream_);
      }
      on_device.push_back(memory_of(name, collection, first));
    }
    return on_device;
  }

  // Copies all memory back from the device, and waits for that.
  void copy_out(const soa_library::Collections &memory) {
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
  template <typename... Arguments>
  void call(soa_runner::DriverFunction which, Arguments... arguments) {
    device_.driver.call(which, "moving the reference", arguments...);
  }

  // The memory of a collection on the device, whose first piece is held_[next].
  soa::Memory memory_of(const std::string &name, const soa::Collection &collection, std::size_t next) const {
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
  std::vector<std::uintptr_t> held_;  // device addresses, one for each piece of each collection
};

struct Arguments {
  std::string folder, device, contract, reference;
  std::size_t wanted_case;
  std::string answers;
};

void prove(const Arguments &given) {
  const soa_library::Json contract = soa_library::Json::parse(read(given.contract));
  const soa::Model model = soa::Model::open(given.folder, given.device);
  std::ofstream answers(given.answers, std::ios::binary);
  soa_library::Place place;
  std::unique_ptr<OnDevice> device;
  if (given.device != "cpu") {
    device = std::make_unique<OnDevice>(target_of(given.folder).substr(0, 4), given.device);
    place.bound = [&](const soa_library::Collections &memory) { return device->copied_in(memory); };
    place.stream = device->stream();
  }
  place.answered = [&](std::size_t number, const soa_library::Collections &memory) {
    if (device != nullptr) device->copy_out(memory);
    if (number == given.wanted_case) write_answers(contract["signature"], memory, answers);
  };
  for (const auto &[name, worst] : soa_library::check_reference(contract, read(given.reference), model, place)) {
    std::printf("output %s %zu %zu %.17g %.17g\n", name.c_str(), worst.elements, worst.outside, worst.gap, worst.relative);
  }
}

}  // namespace

int main(int count, char **words) {
  try {
    if (count != 7) throw std::runtime_error("prove FOLDER DEVICE CONTRACT REFERENCE CASE ANSWERS");
    prove({words[1], words[2], words[3], words[4], std::stoul(words[5]), words[6]});
    return 0;
  } catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 1;
}
