// SPDX-License-Identifier: Apache-2.0
#include "graph/sha256.h"

#include <openssl/evp.h>

#include "base/bytes.h"
#include "base/result.h"

namespace penstock::graph {

void Sha256::Free::operator()(evp_md_ctx_st* context) const { EVP_MD_CTX_free(context); }

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  PENSTOCK_ASSERT(context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
}

void Sha256::update(std::span<const std::byte> bytes) {
  PENSTOCK_ASSERT(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) == 1);
}

std::array<uint8_t, 32> Sha256::finish() {
  std::array<uint8_t, 32> digest;
  PENSTOCK_ASSERT(EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr) == 1);
  return digest;
}

void Sha256::restart() { PENSTOCK_ASSERT(EVP_DigestInit_ex(context_.get(), nullptr, nullptr) == 1); }

std::string short_digest(Sha256& hash) {
  const auto digest = hash.finish();
  std::string text;
  for (size_t i = 0; i < 16; ++i) append_hex(text, digest[i]);
  return text;
}

}  // namespace penstock::graph
