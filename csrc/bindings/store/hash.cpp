// Bindings of block names and digests.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "bindings/store/module.h"
#include "digest/chain_hash.h"
#include "digest/crc32c.h"

namespace kv::python {
namespace {

using OptionalText = std::optional<std::string>;
using OptionalLora = std::optional<std::pair<std::string, std::string>>;

nb::bytes root_of(const OptionalText& seed) {
  uint8_t out[kHashBytes];
  root_hash(seed ? std::string_view(*seed) : kDefaultSeed, out);
  return to_bytes(out, sizeof out);
}

const uint8_t* hash_argument(const nb::bytes& hash, const char* name) {
  if (hash.size() != kHashBytes)
    throw nb::value_error((std::string(name) + " is not 32 bytes").c_str());
  return reinterpret_cast<const uint8_t*>(hash.c_str());
}

template <class Token> std::span<const Token> items_of(const Buffer& buffer) {
  return {reinterpret_cast<const Token*>(buffer.data()), buffer.size() / sizeof(Token)};
}

Tokens tokens_of_buffer(const Buffer& buffer) {
  const char* format = buffer.format();
  if (*format == '@' || *format == '=' || *format == '<') ++format;
  const bool is_signed = std::strchr("ilq", *format) != nullptr;
  const bool is_unsigned = std::strchr("ILQ", *format) != nullptr;
  if (*format != '\0' && format[1] == '\0') {
    if (buffer.item_bytes() == 4 && is_signed) return items_of<int32_t>(buffer);
    if (buffer.item_bytes() == 4 && is_unsigned) return items_of<uint32_t>(buffer);
    if (buffer.item_bytes() == 8 && is_signed) return items_of<int64_t>(buffer);
  }
  throw nb::value_error("tokens must be uint32, int32 or int64");
}

nb::bytes hash_tokens(const Tokens& tokens, size_t block_tokens, const ChainStart& start) {
  const size_t count = std::visit([](auto ids) { return ids.size(); }, tokens);
  const size_t blocks = count / block_tokens;
  PyObject* raw = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(blocks * kHashBytes));
  if (raw == nullptr) throw nb::python_error();
  auto result = nb::steal<nb::bytes>(raw);
  auto* out = reinterpret_cast<uint8_t*>(PyBytes_AsString(raw));
  bool in_range;
  {
    const ReleaseGil released(count * sizeof(uint32_t) > kKeepGilBytes);
    in_range = chain_hashes(tokens, block_tokens, start, out);
  }
  if (!in_range) throw nb::value_error("a token id is not in 0..2**32-1");
  return result;
}

std::vector<int64_t> tokens_of_sequence(nb::handle tokens) {
  std::vector<int64_t> values;
  values.reserve(nb::len(tokens));
  for (nb::handle token : tokens) {
    const long long value = PyLong_AsLongLong(token.ptr());
    if (value == -1 && PyErr_Occurred()) {
      if (!PyErr_ExceptionMatches(PyExc_OverflowError)) throw nb::python_error();
      PyErr_Clear();
      throw nb::value_error("a token id is not in 0..2**32-1");
    }
    values.push_back(value);
  }
  return values;
}

nb::bytes chain_hashes_of(nb::handle tokens, size_t block_tokens, const nb::bytes& root,
                          const std::optional<nb::bytes>& parent, const OptionalLora& lora,
                          const OptionalText& cache_salt) {
  if (block_tokens == 0) throw nb::value_error("block_tokens must be positive");
  ChainStart start;
  start.root = hash_argument(root, "root");
  if (parent) start.parent = hash_argument(*parent, "parent");
  if (lora) start.lora = Lora{lora->first, lora->second};
  if (cache_salt) start.cache_salt = *cache_salt;
  if (!PyObject_CheckBuffer(tokens.ptr())) {
    const std::vector<int64_t> values = tokens_of_sequence(tokens);
    return hash_tokens(values, block_tokens, start);
  }
  const Buffer buffer(tokens);
  return hash_tokens(tokens_of_buffer(buffer), block_tokens, start);
}

nb::list low64_of(nb::handle hashes) {
  const Buffer buffer(hashes);
  if (buffer.size() % kHashBytes != 0)
    throw nb::value_error("hashes are not a multiple of 32 bytes");
  nb::list ids;
  for (size_t at = 0; at < buffer.size(); at += kHashBytes) ids.append(low64(buffer.data() + at));
  return ids;
}

uint32_t crc32c_of(nb::handle data, uint32_t init) {
  const Buffer buffer(data);
  const ReleaseGil released(buffer.size() > kKeepGilBytes);
  return crc32c(buffer.data(), buffer.size(), init);
}

uint32_t copy_crc32c_of(nb::handle dst, nb::handle src) {
  const Buffer to(dst, true), from(src);
  if (from.size() > to.size()) throw nb::value_error("dst is shorter than src");
  const ReleaseGil released(from.size() > kKeepGilBytes);
  return copy_crc32c(to.data(), from.data(), from.size());
}

}  // namespace

void bind_hashing(nb::module_& module) {
  using namespace nb::literals;
  module.def("root_hash", root_of, "seed"_a = nb::none());
  module.def("chain_hashes", chain_hashes_of, "tokens"_a, "block_tokens"_a, nb::kw_only(), "root"_a,
             "parent"_a = nb::none(), "lora"_a = nb::none(), "cache_salt"_a = nb::none());
  module.def("low64", low64_of, "hashes"_a);
  module.def("crc32c", crc32c_of, "data"_a, "init"_a = 0);
  module.def("copy_crc32c", copy_crc32c_of, "dst"_a, "src"_a);
  module.def("crc32c_backend", [] { return crc32c_backends().front().name; });
}

}  // namespace kv::python
