// The numbers of tuning rows that can be measured where the GPU is (`python -m metalcore tune`). A table names its
// tunable fields, each with the values that are legal: with any of them every op is right, and only its speed changes.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace metalcore::gpu {

// The value of a field: one number, or as many as its type has.
using Numbers = std::vector<int64_t>;

struct Legal {
  int64_t lowest = 0, highest = 1, step = 1;
  std::string_view only_on = {};  // the one type of device on which other values than the default are legal
  // The operator of PyTorch that other values than the default call. They are legal where PyTorch has a kernel for it.
  std::string_view calls = {};
};

// A number of threadgroups, simdgroups or threads that a GPU runs at once: so many, or so many for each of its cores.
// (A core is what NVIDIA calls a multiprocessor.) A table binds its rows' counts to the cores of their families' GPUs.
class Count {
 public:
  constexpr Count(uint32_t number) : number_(number) {}
  static constexpr Count per_core(uint32_t number) {
    Count count(number);
    count.per_core_ = true;
    return count;
  }
  void bind(const std::atomic<uint32_t>& cores) {
    if (per_core_) cores_ = &cores;
  }
  operator uint32_t() const { return cores_ ? number_ * cores_->load(std::memory_order_relaxed) : number_; }
  uint32_t for_each_core() const { return per_core_ ? number_ : 0; }  // 0: the number of cores does not matter

 private:
  uint32_t number_;
  bool per_core_ = false;
  const std::atomic<uint32_t>* cores_ = nullptr;
};
constexpr Count per_core(uint32_t number) { return Count::per_core(number); }

// A type of fields that are more than a number has `Numbers numbers() const`, `static Type from(const Numbers&)`, which
// throws std::invalid_argument for what is no value of it, and `static constexpr const char* kind`.
template <typename Value>
constexpr bool is_number = std::is_arithmetic_v<Value> || std::is_same_v<Value, Count>;

template <typename Value>
Numbers numbers_of(const Value& value) {
  if constexpr (std::is_same_v<Value, Count>)
    return {uint32_t{value}};
  else if constexpr (is_number<Value>)
    return {static_cast<int64_t>(value)};
  else
    return value.numbers();
}

// Throws std::invalid_argument, which says what is legal.
int64_t legal_number(const Numbers& numbers, const Legal& legal);

template <typename Value>
Value value_of(const Numbers& numbers, const Legal& legal) {
  if constexpr (std::is_same_v<Value, Count>)
    return Count(static_cast<uint32_t>(legal_number(numbers, legal)));
  else if constexpr (is_number<Value>)
    return static_cast<Value>(legal_number(numbers, legal));
  else
    return Value::from(numbers);
}

template <typename Value>
constexpr const char* kind_of_field() {
  if constexpr (std::is_same_v<Value, bool>)
    return "switch";
  else if constexpr (is_number<Value>)
    return "number";
  else
    return Value::kind;
}

template <typename Row>
struct Field {
  template <typename Value>
  Field(const char* name, Value Row::* member, Legal legal = {})
      : name(name),
        kind(kind_of_field<Value>()),
        legal(legal),
        read([member](const Row& row) { return numbers_of(row.*member); }),
        write([member, legal](Row& row, const Numbers& numbers) { row.*member = value_of<Value>(numbers, legal); }) {
    if constexpr (std::is_same_v<Value, Count>) count = [member](Row& row) { return &(row.*member); };
  }

  std::string name;
  const char* kind;
  Legal legal;
  std::function<Numbers(const Row&)> read;
  std::function<void(Row&, const Numbers&)> write;
  std::function<Count*(Row&)> count;  // null where the field is no Count
};

struct Tunable {
  std::string table, field, kind;  // a "number", a "switch" or "regions"
  Numbers value;
  Legal legal;
  bool measured;      // on this machine
  uint32_t per_core;  // of which the value is a multiple: the number of cores times this; or 0
};

// A value that was measured on this machine.
struct Measured {
  std::string table, field;
  Numbers value;
};

// What all tables have in common. They register themselves while the library is loaded.
class AnyTable {
 public:
  explicit AnyTable(std::string name);
  AnyTable(const AnyTable&) = delete;
  const std::string& name() const { return name_; }

  virtual std::vector<Tunable> tunables(uint32_t family) const = 0;
  // A row like the family's with these values of this table's fields in it. It throws std::invalid_argument for a field
  // that the table does not have, or for an illegal value. `publish` makes it the row of kMeasuredHere.
  virtual std::function<void()> prepare(uint32_t family, const std::vector<Measured>& values,
                                        std::string_view device_type) const = 0;

 protected:
  ~AnyTable() = default;
  [[noreturn]] void refuse(const std::string& field, const std::string& reason) const;

 private:
  std::string name_;
};

// The tunable fields of all tables, with the values that ops on devices of this type use. Those that have no other
// legal value there are left out. Throws std::invalid_argument if this build has no such backend.
std::vector<Tunable> tunables(std::string_view device_type);

// Whether PyTorch has no kernel of an operator for a type of device, by what set_lacking() said.
bool lacks(std::string_view device_type, std::string_view op);
void set_lacking(std::string_view device_type, std::vector<std::string> operators);

// From now on ops on devices of this type use these values, as long as the type's GPU family is `family`; all other
// fields are as the family's rows have them. With no values, it forgets those that were measured. It throws
// std::invalid_argument, and changes nothing, if one of them is unknown or illegal.
void use_measured(std::string_view device_type, std::string_view family, const std::vector<Measured>& values);

// The family of the GPUs of a type of device, as Backend::family gives it.
std::string gpu_family(std::string_view device_type);

// Where a process finds what was measured before: it is called with a type of device, once, before the first plan for
// it, and may call use_measured.
void set_measured_loader(std::function<void(std::string_view device_type)> loader);

}  // namespace metalcore::gpu
