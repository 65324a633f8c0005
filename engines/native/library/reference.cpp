#include "checks.h"

#include <cctype>
#include <cmath>
#include <cstring>

#include "common/artifact.h"

using soa_runner::fail;

namespace soa_library {

namespace {

// Reads a number from memory. The first letter and the size identify the dtype: float16, bfloat16, bool, int8, uint32 ...
long double number(char letter, std::size_t size, const char *address) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, address, std::min(size, sizeof bits));  // little-endian, as on all platforms of torch
  double wide = 0;
  float single = 0;
  if (letter == 'f' && size == 8) return std::memcpy(&wide, &bits, 8), wide;
  if (letter == 'f' && size == 2) {
    const int exponent = static_cast<int>(bits >> 10 & 31), fraction = static_cast<int>(bits & 1023);
    wide = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    if (exponent == 31) wide = fraction == 0 ? INFINITY : NAN;
    return bits >> 15 != 0 ? -wide : wide;
  }
  if (letter == 'b' && size == 2) bits <<= 16;  // bfloat16 is the upper half of a float32
  if (letter == 'f' || (letter == 'b' && size == 2)) return std::memcpy(&single, &bits, 4), single;
  const auto unused = static_cast<int>(64 - 8 * size);
  return letter == 'i' ? static_cast<std::int64_t>(bits << unused) >> unused : static_cast<long double>(bits);
}

// A tensor of the file. It is dense, in row-major order.
struct Stored {
  char letter;
  std::size_t itemsize, elements = 1;
  std::vector<std::size_t> shape;
  const char *data;

  long double operator[](std::size_t i) const { return number(letter, itemsize, data + i * itemsize); }
};

// Safetensors: eight bytes of length, a header in JSON, then the data.
struct Tensors {
  const std::string &file;
  std::uint64_t length = 0;
  Json header;

  explicit Tensors(const std::string &stored) : file(stored) {
    std::memcpy(&length, file.data(), std::min<std::size_t>(file.size(), 8));
    if (file.size() < 8 || length > file.size() - 8) throw std::runtime_error("the reference is cut off");
    header = Json::parse(file.substr(8, length));
  }

  Stored operator[](const std::string &name) const {
    const Json &entry = header[name];
    const std::string &dtype = entry["dtype"].text();
    const std::size_t digits = dtype.find_first_of("1368");
    const std::size_t itemsize = digits == std::string::npos ? 1 : std::stoul(dtype.substr(digits)) / 8;
    Stored found{static_cast<char>(std::tolower(dtype.at(0))), itemsize, 1, {}, nullptr};
    for (const Json &extent : entry["shape"].list()) {
      found.shape.push_back(static_cast<std::size_t>(extent.integer()));
      if (__builtin_mul_overflow(found.elements, found.shape.back(), &found.elements)) found.elements = SIZE_MAX;
    }
    const auto at = static_cast<std::size_t>(entry["data_offsets"].at(0).integer());
    const std::size_t room = file.size() - 8 - length;
    if (at > room || found.elements > (room - at) / found.itemsize) throw std::runtime_error(name + " is cut off");
    found.data = file.data() + 8 + length + at;
    return found;
  }
};

// A collection with the first rows of the stored inputs; all other bytes are 0xff. The file has matrices row by row, the
// collection has them column by column.
soa::Collection filled(const soa::Model &model, const Tensors &tensors, const std::string &name, std::int64_t rows) {
  soa::Collection made = model.collection(name, rows);
  for (const auto &[address, size] : made.pieces()) std::memset(address.get(), 0xff, size);
  for (const soa::Column &column : made.layout().columns) {
    const std::string key = "input/" + name + "/" + column.name;
    if (tensors.header.find(key) == nullptr) continue;
    const Stored stored = tensors[key];
    const std::size_t n = column.kind == "scalar" ? 1 : static_cast<std::size_t>(rows), size = column.itemsize;
    const std::size_t r = stored.shape.size() > 1 ? stored.shape[1] : 1, c = stored.shape.size() > 2 ? stored.shape[2] : 1;
    if (stored.itemsize != size || r * c != column.components || stored.elements < n * r * c) {
      throw std::runtime_error(key + " is not what the layout says");
    }
    for (std::size_t k = 0; k < column.components; ++k) {
      char *to = made.column<char>(column.name, k);
      for (std::size_t i = 0; i < n; ++i) std::memcpy(to + i * size, stored.data + ((i * r + k % r) * c + k / r) * size, size);
    }
  }
  return made;
}

// Limits the offsets of a jagged collection to the number of items of the case.
void cut_offsets(const soa::Collection &offsets, std::int64_t items) {
  for (const soa::Column &column : offsets.layout().columns) {
    for (std::int64_t i = 0; i < offsets.size(); ++i) {
      char *at = offsets.column<char>(column.name) + static_cast<std::size_t>(i) * column.itemsize;
      if (number('i', column.itemsize, at) > items) std::memcpy(at, &items, column.itemsize);
    }
  }
}

// Compares an output with the reference, and then restores its bytes from before the run.
void compare(const Json &plan, const Stored &stored, const Json &tolerance, const soa::Collection &found,
             const soa::Collection &before, Worst *worst) {
  const std::size_t n = plan["kind"].text() == "scalars" ? 1 : static_cast<std::size_t>(found.size());
  const std::size_t features = plan["order"].list().size();
  const double atol = tolerance["atol"].real(), rtol = tolerance["rtol"].real();
  if (stored.elements != n * features) throw std::runtime_error("an output of the reference has another shape");
  for (std::size_t f = 0; f < features; ++f) {
    const Json &component = plan["components"].at(static_cast<std::size_t>(plan["order"].at(f).integer()));
    const soa::Column &column = found.layout()[component.at(0).text()];
    const auto k = static_cast<std::size_t>(component.at(1).integer());
    char *mine = found.column<char>(column.name, k);
    for (std::size_t i = 0; i < n; ++i) {
      const long double is = number(column.dtype[0], column.itemsize, mine + i * column.itemsize);
      long double meant = stored[i * features + f];
      if (column.dtype == "float32") meant = static_cast<float>(meant);
      const bool same = is == meant || (std::isnan(is) && std::isnan(meant)), finite = std::isfinite(is) && std::isfinite(meant);
      const long double gap = same ? 0 : finite ? std::fabs(is - meant) : INFINITY;
      const long double allowed = finite ? atol + rtol * std::fabs(meant) : 0;
      worst->outside += gap > allowed ? 1 : 0;
      worst->gap = std::max(worst->gap, static_cast<double>(gap));
      if (finite && meant != 0) worst->relative = std::max(worst->relative, static_cast<double>(gap / std::fabs(meant)));
    }
    std::memcpy(mine, before.column<char>(column.name, k), n * column.itemsize);
  }
  worst->elements += stored.elements;
}

}  // namespace

std::map<std::string, Worst> check_reference(const Json &manifest, const std::string &stored, const soa::Model &model,
                                             const Place &place) {
  const Tensors tensors(stored);
  const Json &signature = manifest["signature"], &layouts = signature["collections"], &jagged = signature.get("jagged");
  const Json cases = Json::parse(tensors.header["__metadata__"]["cases"].text());
  std::map<std::string, Worst> worst;
  for (std::size_t i = 0; i < cases.list().size(); ++i) {
    Collections memory, before;
    std::vector<soa::Memory> bound;
    for (Collections *each : {&before, &memory}) {
      for (const std::string &name : layouts.keys) {
        each->emplace(name, filled(model, tensors, name, cases.at(i)[layouts[name]["rows"].text()].integer()));
      }
      for (const std::string &name : jagged.keys) {
        cut_offsets(each->at(name + "_offsets"), each->at(name).size());
      }
    }
    for (const auto &[name, collection] : memory) bound.push_back(collection);
    model.bind(place.bound ? place.bound(memory) : bound)(place.stream);
    if (place.answered) place.answered(i, memory);
    for (const Json &output : signature["outputs"].list()) {
      const std::string &name = output["name"].text(), &where = output["collection"].text();
      const Stored meant = tensors["output/" + std::to_string(i) + "/" + name];
      compare(output["plan"], meant, manifest["tolerances"][name], memory.at(where), before.at(where), &worst[name]);
    }
    for (const auto &[name, collection] : memory) {
      for (std::size_t k = 0; k < collection.pieces().size(); ++k) {
        const auto &[address, size] = collection.pieces()[k];
        if (std::memcmp(address.get(), before.at(name).pieces()[k].first.get(), size) == 0) continue;
        fail(soa::refusals::deviation_memory, "the artifact wrote outside its outputs in collection '%s' (case %zu)", name.c_str(), i);
      }
    }
  }
  for (const auto &[name, found] : worst) {
    const Json &tolerance = manifest["tolerances"][name], &allowed = tolerance.get("max_outside");
    const double most = allowed.kind == Json::null ? 0 : allowed.real();
    if (static_cast<double>(found.outside) <= most * static_cast<double>(found.elements)) continue;
    fail(soa::refusals::deviation, "output '%s': %zu of %zu values are outside atol %g + rtol %g of the reference, the worst by %.3g",
         name.c_str(), found.outside, found.elements, tolerance["atol"].real(), tolerance["rtol"].real(), found.gap);
  }
  return worst;
}

}  // namespace soa_library
