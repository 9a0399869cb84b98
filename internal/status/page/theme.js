// SPDX-License-Identifier: Apache-2.0
// Runs before the first paint, so that the chosen theme does not flash.
'use strict';
{
  let theme = null;
  try {
    theme = localStorage.getItem('fairlead-theme');
  } catch {
    // Storage may be forbidden: the system's theme it is.
  }
  if (theme === 'light' || theme === 'dark') document.documentElement.dataset.theme = theme;
}
