// SPDX-License-Identifier: Apache-2.0

package netwatch

import (
	"testing"

	"github.com/fairlead/fairlead/internal/testkit/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }
