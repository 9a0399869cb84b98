// SPDX-License-Identifier: Apache-2.0

// Package wine runs fairlead.exe under wine, as far as wine goes.
package wine
