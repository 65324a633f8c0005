// Reads a manifest's signature. It refuses everything that soa/signature.py, soa/block.py and soa/layout.py refuse, and
// derives the arguments of an artifact.
#include <algorithm>
#include <set>
#include <tuple>

#include "checks.h"

namespace soa_library {

namespace {

using Extents = std::vector<std::int64_t>;
using Component = std::pair<std::string, std::size_t>;

constexpr std::int64_t kMostRows = std::int64_t{1} << 40, kMostComponents = 1 << 16, kLargestAlignment = 1 << 30;
constexpr std::size_t kLargestOpaque = 1 << 24;

const std::map<std::string, std::size_t> kSizes = {{"bool", 1},    {"int8", 1},     {"int16", 2},   {"int32", 4},
                                                   {"int64", 8},   {"uint8", 1},    {"uint16", 2},  {"uint32", 4},
                                                   {"float16", 2}, {"bfloat16", 2}, {"float32", 4}, {"float64", 8}};

void require(bool good, const std::string &why) {
  if (!good) throw std::runtime_error("signature: " + why);
}

// True for the dtypes that a model can take. Columns of other dtypes are only stored.
bool is_number(const std::string &dtype) { return kSizes.count(dtype) > 0; }
bool is_float(const std::string &dtype) { return dtype.find("float") != std::string::npos; }

std::size_t itemsize(const std::string &dtype) {
  if (is_number(dtype)) return kSizes.at(dtype);
  if (dtype == "uint64") return 8;
  const std::string digits = dtype.compare(0, 6, "opaque") == 0 ? dtype.substr(6) : "";
  const bool counted = !digits.empty() && digits.size() <= 8 && digits[0] != '0' &&
                       digits.find_first_not_of("0123456789") == std::string::npos;
  require(counted && std::stoul(digits) <= kLargestOpaque, "unknown dtype '" + dtype + "'");
  return std::stoul(digits);
}

// Requires all `keys`, and no others except the `optional` ones.
void require_keys(const Json &value, const std::set<std::string> &keys, const std::set<std::string> &optional = {}) {
  for (const std::string &key : keys) value[key];
  for (const std::string &key : value.keys) require(keys.count(key) + optional.count(key) > 0, "unknown key '" + key + "'");
}

Extents extents_of(const Json &list) {
  Extents found;
  for (const Json &extent : list.list()) found.push_back(extent.integer());
  return found;
}

std::int64_t product(const Extents &extents) {
  std::int64_t found = 1;
  for (const std::int64_t extent : extents) require(!__builtin_mul_overflow(found, extent, &found), "a shape without end");
  return found;
}

// -- columns ---------------------------------------------------------------------------------------------------------

struct Member : soa::Column {
  Extents shape;

  // The physical component that holds entry `index` of an Eigen object, counted row by row.
  std::size_t component_of(std::size_t index) const {
    if (shape.size() < 2) return index;
    const auto rows = static_cast<std::size_t>(shape[0]), cols = static_cast<std::size_t>(shape[1]);
    return index % cols * rows + index / cols;
  }
};

Member read_member(const Json &stored) {
  require_keys(stored, {"dtype", "kind", "name", "shape"});
  Member found;
  found.name = stored["name"].text();
  found.dtype = stored["dtype"].text();
  found.kind = stored["kind"].text();
  found.shape = extents_of(stored["shape"]);
  require(is_identifier(found.name), "column name '" + found.name + "' is not an identifier");
  found.itemsize = itemsize(found.dtype);
  if (found.kind != "eigen") {
    require(found.kind == "column" || found.kind == "scalar", "column '" + found.name + "' is of an unknown kind");
    require(found.shape.empty(), "column '" + found.name + "' has a shape");
    return found;
  }
  require(!found.opaque() && !found.shape.empty() && found.shape.size() <= 2, "column '" + found.name + "' is no Eigen object");
  for (const std::int64_t extent : found.shape) require(extent >= 1 && extent <= kMostComponents, "an extent out of range");
  require(product(found.shape) <= kMostComponents, "column '" + found.name + "' has too many entries");
  found.components = static_cast<std::size_t>(product(found.shape));
  return found;
}

struct Members {
  soa::Layout layout;
  std::vector<Member> members;

  const Member &operator[](const std::string &name) const {
    for (const Member &each : members) {
      if (each.name == name) return each;
    }
    throw std::runtime_error("signature: no column '" + name + "'");
  }
};

Members read_collection(const Json &stored) {
  require_keys(stored, {"alignment", "columns", "rows", "storage"});
  Members found;
  const std::int64_t alignment = stored["alignment"].integer();
  require(alignment >= 1 && alignment <= kLargestAlignment && (alignment & (alignment - 1)) == 0, "no alignment");
  found.layout.alignment = static_cast<std::size_t>(alignment);
  found.layout.rows = stored["rows"].text();
  found.layout.storage = stored["storage"].text();
  const bool buffer = found.layout.storage == "buffer";
  require(buffer || found.layout.storage == "columns", "unknown storage '" + found.layout.storage + "'");
  std::set<std::string> names;
  for (const Json &each : stored["columns"].list()) {
    const Member member = read_member(each);
    require(names.insert(member.name).second, "column '" + member.name + "' is declared twice");
    require(!buffer || member.opaque() || member.itemsize <= found.layout.alignment, "an alignment below an element");
    found.members.push_back(member);
    found.layout.columns.push_back(member);
  }
  require(!names.empty(), "a collection without columns");
  return found;
}

struct Range {
  std::int64_t min, max;
  bool unbounded;
};

Range read_range(const Json &stored) {
  require_keys(stored, {"max", "min", "typical"}, {"unbounded"});
  const Json *unbounded = stored.find("unbounded");
  require(unbounded == nullptr || unbounded->truth(), "'unbounded' is left out where it is false");
  const Range found{stored["min"].integer(), stored["max"].integer(), unbounded != nullptr};
  require(found.min >= 0 && found.min <= found.max && found.max >= 2 && found.max <= kMostRows, "no range of rows");
  for (const Json &n : stored["typical"].list()) {
    require(n.integer() >= found.min && n.integer() <= found.max, "a typical n outside the range");
  }
  return found;
}

// -- blocks ----------------------------------------------------------------------------------------------------------

struct Block {
  std::string name, collection, kind, dtype;
  bool broadcast;
  std::vector<std::string> columns, dtypes;
  std::vector<Component> components;
  std::vector<std::size_t> order;
  Extents feature_shape;
};

// The components in the order of the buffer, if they are adjacent there and have one dtype; else empty.
std::vector<Component> buffer_run(const Members &in, const Block &block) {
  if (in.layout.storage != "buffer" || std::set<std::string>(block.dtypes.begin(), block.dtypes.end()).size() > 1) return {};
  std::vector<Component> physical;
  for (const Member &member : in.members) {
    for (std::size_t k = 0; k < member.components; ++k) physical.emplace_back(member.name, k);
  }
  const std::set<Component> wanted(block.components.begin(), block.components.end());
  const auto is_wanted = [&](const Component &each) { return wanted.count(each) > 0; };
  const auto first = std::find_if(physical.begin(), physical.end(), is_wanted);
  const auto end = std::find_if_not(first, physical.end(), is_wanted);
  if (static_cast<std::size_t>(end - first) != wanted.size()) return {};
  return {first, end};
}

void plan_components(const Members &in, Block &block) {
  std::size_t scalars = 0;
  std::vector<Extents> shapes;
  for (const std::string &name : block.columns) {
    const Member &member = in[name];
    require(is_number(member.dtype), "no model gets column '" + name + "'");
    scalars += member.kind == "scalar" ? 1 : 0;
    shapes.push_back(member.shape);
    for (std::size_t i = 0; i < member.components; ++i) {
      block.components.emplace_back(name, member.component_of(i));
      block.dtypes.push_back(member.dtype);
    }
  }
  require(scalars == 0 || scalars == shapes.size(), "block '" + block.name + "' mixes scalars with columns");
  require(scalars > 0 || !block.broadcast, "block '" + block.name + "' has broadcast, and no scalars");
  const std::size_t count = block.components.size();
  if (block.feature_shape.empty()) block.feature_shape = {static_cast<std::int64_t>(count)};
  if (shapes.size() == 1 && shapes[0].size() == 2) block.feature_shape = shapes[0];
  const std::vector<Component> run = scalars > 0 ? std::vector<Component>() : buffer_run(in, block);
  block.kind = scalars > 0 ? "scalars" : run.empty() ? "columns" : "matrix";
  std::map<Component, std::size_t> places;
  for (const Component &component : run.empty() ? block.components : run) places.emplace(component, places.size());
  for (const Component &component : block.components) block.order.push_back(places.at(component));
  if (run.empty()) return;
  block.components = run;
  block.dtypes.resize(1);
}

// True if a list has exactly these values, in this order.
template <typename Values, typename Is>
bool lists(const Json &stored, const Values &values, const Is &is) {
  return stored.list().size() == values.size() && std::equal(values.begin(), values.end(), stored.list().begin(), is);
}

void require_plan(const Json &stored, const Block &block) {
  require_keys(stored, {"components", "dtype", "dtypes", "feature_shape", "kind", "order"});
  const auto same_text = [](const std::string &a, const Json &b) { return a == b.text(); };
  const auto same_number = [](auto a, const Json &b) { return static_cast<std::int64_t>(a) == b.integer(); };
  const auto same_component = [&](const Component &a, const Json &b) {
    return b.list().size() == 2 && same_text(a.first, b.at(0)) && same_number(a.second, b.at(1));
  };
  const bool same = lists(stored["components"], block.components, same_component) && same_text(block.dtype, stored["dtype"]) &&
                    lists(stored["dtypes"], block.dtypes, same_text) && same_text(block.kind, stored["kind"]) &&
                    lists(stored["feature_shape"], block.feature_shape, same_number) &&
                    lists(stored["order"], block.order, same_number);
  require(same, "the plan of block '" + block.name + "' does not follow from its layout");
}

Block read_block(const Json &stored, const std::map<std::string, Members> &collections) {
  require_keys(stored, {"collection", "columns", "dtype", "name", "plan", "shape"}, {"broadcast"});
  const Json *broadcast = stored.find("broadcast");
  require(broadcast == nullptr || broadcast->truth(), "'broadcast' is left out where it is false");
  Block block{stored["name"].text(), stored["collection"].text(), "", "", broadcast != nullptr, {}, {}, {}, {}, {}};
  const auto in = collections.find(block.collection);
  require(in != collections.end(), "block '" + block.name + "': no collection '" + block.collection + "'");
  for (const Json &column : stored["columns"].list()) block.columns.push_back(column.text());
  const std::set<std::string> names(block.columns.begin(), block.columns.end());
  require(!names.empty() && names.size() == block.columns.size(), "block '" + block.name + "' has none or equal columns");
  plan_components(in->second, block);
  const Json &shape = stored["shape"], &dtype = stored["dtype"];
  if (shape.kind != Json::null) {
    block.feature_shape = extents_of(shape);
    for (const std::int64_t extent : block.feature_shape) require(extent >= 1, "a shape below 1");
    require(product(block.feature_shape) == static_cast<std::int64_t>(block.order.size()), "a shape of other components");
  }
  if (dtype.kind != Json::null) {
    require(is_number(dtype.text()), "unknown dtype '" + dtype.text() + "'");
    block.dtype = dtype.text();
  } else {
    const std::set<std::string> dtypes(block.dtypes.begin(), block.dtypes.end());
    require(dtypes.size() == 1, "block '" + block.name + "' does not say its dtype");
    block.dtype = *dtypes.begin();
  }
  require_plan(stored["plan"], block);
  return block;
}

// -- the whole -------------------------------------------------------------------------------------------------------

struct Signature {
  std::map<std::string, Members> collections;
  std::map<std::string, Range> rows;
  std::vector<Block> inputs, outputs;

  std::vector<const Block *> blocks() const {
    std::vector<const Block *> found;
    for (const std::vector<Block> *side : {&inputs, &outputs}) {
      for (const Block &block : *side) found.push_back(&block);
    }
    return found;
  }
  const std::string &rows_of(const Block &block) const { return collections.at(block.collection).layout.rows; }

  // The row dimensions, in the order of the carriers.
  std::vector<std::string> dims() const {
    std::vector<std::string> found;
    for (const Block *block : blocks()) {
      if (std::find(found.begin(), found.end(), rows_of(*block)) == found.end()) found.push_back(rows_of(*block));
    }
    return found;
  }
  bool has_tiles() const {
    const auto whole = [](const Block &block) { return block.kind == "scalars"; };
    return dims().size() == 1 && rows.at(dims()[0]).min <= 1 && std::none_of(outputs.begin(), outputs.end(), whole);
  }
};

void require_jagged(const Json &jagged, const Signature &signature) {
  require(!jagged.keys.empty(), "'jagged' is left out where nothing is");
  for (const std::string &name : jagged.keys) {
    require(jagged[name].kind == Json::number && jagged[name].integral, "jagged '" + name + "' is no number");
    const auto offsets = signature.collections.find(name + "_offsets"), items = signature.collections.find(name);
    require(offsets != signature.collections.end(), "jagged '" + name + "' has no offsets");
    require(items == signature.collections.end() || items->second.layout.rows != offsets->second.layout.rows,
            "jagged '" + name + "' has the rows of its offsets");
  }
}

void require_sound(const Signature &signature) {
  require(!signature.inputs.empty() && !signature.outputs.empty(), "a model needs inputs and outputs");
  std::set<std::string> names, used;
  for (const Block *block : signature.blocks()) {
    require(names.insert(block->name).second, "two blocks are called '" + block->name + "'");
    used.insert(block->collection);
  }
  require(used.size() == signature.collections.size(), "a collection without a block");
  for (const std::string &dim : signature.dims()) {
    require(!signature.rows.at(dim).unbounded || signature.has_tiles(), "rows that are unbounded, and cannot be cut");
  }
  std::set<std::pair<std::string, std::string>> read, written;  // columns, by their collection
  for (const Block &block : signature.inputs) {
    for (const std::string &column : block.columns) read.emplace(block.collection, column);
  }
  for (const Block &block : signature.outputs) {
    require(!block.broadcast, "output '" + block.name + "' has broadcast");
    for (const std::string &column : block.columns) {
      require(read.count({block.collection, column}) == 0, "column '" + column + "' is an input and an output");
      require(written.emplace(block.collection, column).second, "column '" + column + "' is written twice");
    }
    const bool one = std::set<std::string>(block.dtypes.begin(), block.dtypes.end()).size() == 1;
    require(one || std::all_of(block.dtypes.begin(), block.dtypes.end(), is_float), "an output of several dtypes");
  }
}

Signature read_signature(const Json &stored) {
  require_keys(stored, {"collections", "inputs", "outputs", "rows"}, {"jagged"});
  Signature found;
  for (const std::string &dim : stored["rows"].keys) found.rows.emplace(dim, read_range(stored["rows"][dim]));
  for (const std::string &name : stored["collections"].keys) {
    const Members read = read_collection(stored["collections"][name]);
    require(found.rows.count(read.layout.rows) > 0, "collection '" + name + "': no range for its rows");
    found.collections.emplace(name, read);
  }
  for (const Json &block : stored["inputs"].list()) found.inputs.push_back(read_block(block, found.collections));
  for (const Json &block : stored["outputs"].list()) found.outputs.push_back(read_block(block, found.collections));
  require_sound(found);
  if (const Json *jagged = stored.find("jagged")) require_jagged(*jagged, found);
  return found;
}

// Adds the arguments of a block, as soa/signature_lines.py describes them.
void add_arguments(const Signature &signature, const Block &block, const char *role, std::vector<soa::detail::Argument> &to) {
  const bool matrix = block.kind == "matrix";
  const std::string kind = matrix ? "matrix" : block.kind == "scalars" ? "scalar" : "column";
  for (std::size_t i = 0; i < (matrix ? 1 : block.components.size()); ++i) {
    const auto &[column, component] = block.components[i];
    to.push_back({kind, signature.rows_of(block), block.dtypes[i], block.collection, column, role, component,
                  matrix ? block.components.size() : 1});
  }
}

}  // namespace

Contract::Contract(const Json &stored) {
  const Signature signature = read_signature(stored);
  for (const auto &[name, members] : signature.collections) layouts.emplace(name, members.layout);
  for (const std::string &dim : signature.dims()) {
    const auto &range = signature.rows.at(dim);
    rows[dim] = {range.min, range.max, range.max};
    arguments.push_back({"carrier", dim, "float32", "-", "-", "carrier", 0, 1});
  }
  for (const Block &block : signature.inputs) add_arguments(signature, block, "input", arguments);
  for (const Block &block : signature.outputs) add_arguments(signature, block, "output", arguments);
  for (const auto &[dim, range] : signature.rows) limit = std::max(limit, range.unbounded ? kMostRows : range.max);
  const std::map<std::string, char> letters = {{"carrier", 'n'}, {"column", 'c'}, {"matrix", 'm'}, {"scalar", '-'}};
  if (!signature.has_tiles()) return;
  for (const soa::detail::Argument &argument : arguments) tile_kinds += letters.at(argument.kind);
}

void Contract::require_described(const soa::detail::State &found, const Json &candidate) const {
  const auto told = [](const soa::detail::Argument &a) {
    return std::tie(a.kind, a.rows, a.dtype, a.collection, a.column, a.role, a.component, a.count);
  };
  const auto same = [&](const auto &a, const auto &b) { return told(a) == told(b); };
  bool fits = found.layouts == layouts && found.rows.size() == rows.size() &&
              std::equal(arguments.begin(), arguments.end(), found.arguments.begin(), found.arguments.end(), same);
  for (const auto &[dim, range] : rows) {
    const auto there = found.rows.find(dim);
    fits = fits && there != found.rows.end() && there->second.min == range.min &&
           there->second.compiled == range.compiled && there->second.max == (found.tile > 0 ? limit : range.max);
  }
  const Json *tile = candidate.find("tile"), *windows = candidate.find("windows");
  const bool tiled = tile != nullptr && tile->kind == Json::number;
  fits = fits && (found.tile == 0 || (tiled && tile->real() == static_cast<double>(found.tile) && found.kinds == tile_kinds));
  fits = fits && (!found.any_first || (windows != nullptr && windows->truth()));
  if (!fits) throw std::runtime_error("arguments.txt says something else than the manifest");
}

}  // namespace soa_library
