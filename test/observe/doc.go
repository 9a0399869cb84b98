// SPDX-License-Identifier: Apache-2.0

// Package observe tests what people look at: the page in a real Chromium, the
// dashboard's queries and the alerts in a real Prometheus. Agent and host peer are the
// real program in network namespaces of their own.
package observe
