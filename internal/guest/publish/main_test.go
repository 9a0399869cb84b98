// SPDX-License-Identifier: Apache-2.0

//go:build linux

package publish

import (
	"os"
	"testing"

	"github.com/fairlead/fairlead/internal/testkit/leak"
)

// roleVariable makes the test binary a client in a container.
const roleVariable = "FAIRLEAD_PUBLISH_ROLE"

func TestMain(m *testing.M) {
	if role := os.Getenv(roleVariable); role != "" {
		os.Exit(playRole(role))
	}
	leak.Main(m)
}
