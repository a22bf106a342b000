// The functions that failing checks of -fsanitize=undefined call, in place of libubsan's. They tell the executor, which
// ends the dispatch or lets it go on.
#pragma once

namespace msl::callbacks {

// The compilers' layouts of what they pass.
struct Place {
  const char* file;
  uint32_t line, column;
};
struct Type {
  uint16_t kind, information;  // an integer's information: the logarithm of its bits, then whether it is signed
  char name[1];
};
struct IndexData {
  Place place;
  const Type *array, *index;
};
struct PointerData {
  Place place;
  const Type* type;
  uint8_t log_alignment, use;  // use: 0 is a load, 1 a store, others a reference and the like
};

#define MSL_HANDLER(name, arguments)                                                               \
  MSL_UNINSTRUMENTED __attribute__((MSL_CALLBACK_PLACE, used, visibility("hidden"))) void name     \
      arguments __asm__("__ubsan_handle_" #name);                                                  \
  void name arguments
#define MSL_FIND(kind, index, count, type)                                           \
  do {                                                                               \
    const msl_abi::Finding finding = {msl_abi::Finding::kind, index, count, type};   \
    if (runtime) runtime->finding(&finding, __builtin_return_address(0));            \
  } while (false)

MSL_HANDLER(out_of_bounds, (const IndexData* data, uintptr_t index)) {
  const uint32_t bits = 1u << (data->index->information >> 1);
  int64_t value = int64_t(index);
  if (data->index->information & 1 && bits < 64) value = int64_t(uint64_t(value) << (64 - bits)) >> (64 - bits);
  // The name is the array type's: 'float [8]', or 'float [4][8]' for four of those.
  uint64_t count = 0;
  for (const char* at = __builtin_strchr(data->array->name, '['); at && *++at >= '0' && *at <= '9';)
    count = count * 10 + uint64_t(*at - '0');
  MSL_FIND(kIndex, value, count, data->array->name);
}
MSL_HANDLER(type_mismatch_v1, (const PointerData* data, uintptr_t address)) {
  if (!address) return;  // no variable: the check of the access says more
  if (data->use == 1)
    MSL_FIND(kWriteBeyond, 0, 0, data->type->name);
  else
    MSL_FIND(kReadBeyond, 0, 0, data->type->name);
}
MSL_HANDLER(divrem_overflow, (const void*, uintptr_t, uintptr_t)) { MSL_FIND(kDivision, 0, 0, ""); }
MSL_HANDLER(builtin_unreachable, (const void*)) {
  MSL_FIND(kUnreachable, 0, 0, "");
  __builtin_trap();
}
MSL_HANDLER(missing_return, (const void*)) {
  MSL_FIND(kNoReturn, 0, 0, "");
  __builtin_trap();
}

// Reports an index of a vector or a matrix, which is no array for compilers.
MSL_UNINSTRUMENTED __attribute__((MSL_CALLBACK_PLACE)) static void index_beyond(size_t index, size_t count) {
  MSL_FIND(kIndex, int64_t(index), count, "");
}
METAL_FUNC constexpr void check_index(size_t index, size_t count) {
  if (!__builtin_is_constant_evaluated() && index >= count) index_beyond(index, count);
}
#undef MSL_HANDLER

}  // namespace msl::callbacks
