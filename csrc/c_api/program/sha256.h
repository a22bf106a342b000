// SHA-256 (FIPS 180-4). It is ours for the reason in json.h; CommonCrypto and OpenSSL are each on one system only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace metalcore::c_api {

class Sha256 {
 public:
  void update(const void* data, size_t size);
  // The digest in 64 hexadecimal digits. Nothing may follow.
  std::string finish();

 private:
  void block(const unsigned char* data);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> waiting_{};
  uint64_t size_ = 0;
};

}  // namespace metalcore::c_api
