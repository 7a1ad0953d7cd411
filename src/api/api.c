/* api: the list of all APIs. */
#include "api/api.h"

#include "api/internal.h"

const struct server_module *const api_modules[] = {&ab_module,
                                                   &openai_module,
                                                   &vllm_module,
                                                   &llamacpp_module,
                                                   &ollama_module,
                                                   &ask_module,
                                                   &conversations_module,
                                                   &jobs_module,
                                                   &system_module,
                                                   &worlds_module,
                                                   &page_module,
                                                   &backups_module,
                                                   &knowledge_module,
                                                   &memories_module,
                                                   &sleep_module,
                                                   &mcp_module,
                                                   &cluster_module,
                                                   NULL};
